"""Decode steps replayed as CUDA graphs, on request rows that stay on the device."""
