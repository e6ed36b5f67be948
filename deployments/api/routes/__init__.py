"""Endpoints that generate nothing: health, the cluster, loading models, and the decisions of the router."""
