"""Endpoints that generate nothing: health, the cluster, models, router decisions, and stored objects."""
