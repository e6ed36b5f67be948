"""Runs steps: prepares a plan for the device, computes the forward pass, samples, and measures the time."""
