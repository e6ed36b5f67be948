"""Autoscaling tried on recorded traffic: the real policy, with simulated replicas that take time to boot."""
