"""Sampling noise as a function of (seed, position): no generator, no state, the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per (seed, position): float64 [R], multiples of 2^-53.

    Position p of a seed is the p-th output of a splitmix64 generator (Steele, Lea and Flood 2014) that starts at
    the seed, mixed once so that neighbouring seeds do not yield shifted copies of one stream.
    """
    seed = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    bits = _mix(_mix(seed + _GAMMA) + (position + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finaliser of splitmix64; arithmetic is modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
