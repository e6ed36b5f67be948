"""Kernels for GPUs, in Triton. Each has a launcher that takes tensors; nothing here knows of an engine."""
