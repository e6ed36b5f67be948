"""The interface between the API and the engines, and its client: attempts, retries, migrations, hedging."""
