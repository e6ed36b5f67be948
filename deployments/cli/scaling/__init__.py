"""Autoscaling tried on recorded traffic: the real policy, over simulated replicas that take time to boot."""
