"""Simulators: recorded traffic on a simulated fleet, its autoscaling, and plans of how many GPUs a load needs."""
