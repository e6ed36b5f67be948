"""Embeddings from hidden states: cut, then scaled to length 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
_BLOCK = 2**18
"""Numbers that are processed together."""


def values_of(packed: bytes) -> Vector:
    """Return the values of a pooled request's delta. Raises ValueError if the number of bytes is wrong."""
    return np.frombuffer(packed, dtype="<f4")


def embedding(state: Vector, dimensions: int | None = None, *, normalizes: bool = True) -> Vector:
    """Return a hidden state as an embedding of that many dimensions, by default all.

    A cut makes sense for models that were trained for it (Kusupati et al. 2022, arXiv:2205.13147).
    """
    one: Vector = embeddings([state], dimensions, normalizes=normalizes)[0]
    return one


def embeddings(states: Sequence[Vector], dimensions: int | None = None, *, normalizes: bool = True) -> Vector:
    """Return hidden states as embeddings, one in each row.

    Many are processed together: numpy releases the interpreter's lock in each call and takes it again, and a
    thread that does so every few microseconds starves the others.
    """
    made = np.stack([state[:dimensions] for state in states])
    rows = max(1, _BLOCK // max(1, made.shape[1]))
    for start in range(0, len(made) if normalizes else 0, rows):
        block = made[start : start + rows]
        lengths = np.linalg.norm(block.astype(np.float64), axis=1, keepdims=True)
        block /= np.where(lengths == 0.0, 1.0, lengths)
    return made
