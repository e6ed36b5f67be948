"""Encoders, which read a whole prompt at once, each token seeing all others: for embeddings and scores alone."""
