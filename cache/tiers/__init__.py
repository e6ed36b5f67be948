"""Prefixes outside the tree of one engine: in slower memories, and lent to other engines."""
