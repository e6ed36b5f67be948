"""What the API is built from, and what it shares with the API that takes its place."""
