"""Targets of weights, and those of projections and vectors that all kinds of layers have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.parallel.shard import Shard

Places = npt.NDArray[np.int64]
Own = slice | Places
"""Rows of a tensor: a slice, or indices."""


class WeightTarget(NamedTuple):
    """The place to which a tensor of the checkpoint is loaded."""

    parameter: str
    rows: slice | tuple[int, slice]
    """Rows of the parameter; in a stack of experts' matrices, the rows of one expert."""
    shape: tuple[int, ...]
    """The shape the checkpoint must have; copied with broadcasting."""
    part: tuple[Own, ...] = ()
    """This rank's part of the tensor."""
    view: tuple[int, ...] | None = None
    """The shape to which this part is viewed; None: unchanged."""
    added: float | None = None
    """Number added to the tensor; the parameter is then float32. None: no addition, and the model's type."""
    is_turned: bool = False
    """Whether the last two axes of this part are swapped."""


def whole(parameter: str, *shape: int) -> WeightTarget:
    """Return the target of a tensor that every rank has unchanged."""
    return WeightTarget(parameter, slice(None), shape)


def fused(
    names: Sequence[str], ours: str, parts: Sequence[tuple[int, Own]], inputs: int, bias: bool
) -> Iterator[tuple[str, WeightTarget]]:
    """Yield projections of the same input, stacked by rows. `parts`: all outputs of each, and this rank's.

    A single name means that the checkpoint stacks them too.
    """
    if len(names) == 1 < len(parts):
        parts = [_stacked(parts)]
    first = 0
    for name, (outputs, own) in zip(names, parts, strict=True):
        rows = slice(first, first + _length(own, outputs))
        yield f"{name}.weight", WeightTarget(f"{ours}.weight", rows, (outputs, inputs), (own,))
        if bias:
            yield f"{name}.bias", WeightTarget(f"{ours}.bias", rows, (outputs,), (own,))
        first = rows.stop


def _stacked(parts: Sequence[tuple[int, Own]]) -> tuple[int, Own]:
    """Return all outputs of projections that the checkpoint stacks, and this rank's."""
    total = sum(outputs for outputs, _ in parts)
    firsts = [sum(outputs for outputs, _ in parts[:index]) for index in range(len(parts))]
    own = [np.arange(first, first + n)[rows] for first, (n, rows) in zip(firsts, parts, strict=True)]
    rows = np.concatenate(own)
    return total, slice(0, total) if np.array_equal(rows, np.arange(total)) else rows


def _length(rows: Own, total: int) -> int:
    return len(rows) if isinstance(rows, np.ndarray) else len(range(total)[rows])


def summed(
    theirs: str, ours: str, outputs: int, inputs: int, shard: Shard, bias: bool
) -> Iterator[tuple[str, WeightTarget]]:
    """Yield a projection with inputs divided among ranks and outputs summed; rank 0 adds the bias."""
    part = (slice(None), shard.part(inputs))
    yield f"{theirs}.weight", WeightTarget(f"{ours}.weight", slice(None), (outputs, inputs), part)
    if bias:
        rows = slice(None) if shard.rank == 0 else slice(0)
        yield f"{theirs}.bias", WeightTarget(f"{ours}.bias", rows, (outputs,), (rows,))
