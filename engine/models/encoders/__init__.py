"""Encoders, in which each token of a prompt attends to all others: only for embeddings and scores."""
