"""Embeddings from hidden states: cut, then scaled to length 1."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


def values_of(packed: bytes) -> Vector:
    """Return the values that a pooled request's delta has. Raises ValueError for a broken number of bytes."""
    return np.frombuffer(packed, dtype="<f4")


def embedding(state: Vector, dimensions: int | None = None, *, normalizes: bool = True) -> Vector:
    """Return a hidden state as an embedding of that many dimensions, by default all.

    A cut makes sense for models that were trained for it (Kusupati et al. 2022, arXiv:2205.13147).
    """
    cut = state[:dimensions]
    length = float(np.linalg.norm(cut.astype(np.float64))) if normalizes else 1.0
    return (cut / length).astype(np.float32) if length else cut
