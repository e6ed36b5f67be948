"""Figures of a cache for metrics: the state of every page, what was reused, and how old pages become."""
