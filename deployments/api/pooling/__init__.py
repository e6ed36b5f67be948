"""Embeddings, and how well documents answer a query: requests that end with their prompts."""
