"""Prefixes that all namespaces of a model share."""
