"""Compute kernels: `native/` in C for CPUs, compiled by `build.py`, loaded by `native.py`; `triton/` for GPUs."""
