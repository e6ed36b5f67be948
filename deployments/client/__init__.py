"""The seam between the API and the engines, and a request's way over it: attempts, retries, migrations."""
