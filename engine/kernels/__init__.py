"""Kernels in C for CPUs: `native/` is their source, `build.py` compiles it, `native.py` loads it."""
