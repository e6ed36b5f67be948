"""Streams that any ingress can continue after any event."""
