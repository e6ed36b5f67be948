"""Utilities for all packages of the engine: errors, files, and the cores, clocks and memory of this process."""
