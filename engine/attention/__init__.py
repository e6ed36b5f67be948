"""Attention over paged KV: the batch's metadata, the backend protocol and the backends."""
