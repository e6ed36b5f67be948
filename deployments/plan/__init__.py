"""Sizes before anything runs: what fits on a GPU, how fast it can be, how many replicas a load needs."""
