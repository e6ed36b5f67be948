"""Sizing without running a model: what fits on a GPU, its speed there, and the replicas that a load needs."""
