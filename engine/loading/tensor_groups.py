"""The unit of loading: tensors of a checkpoint, their expected form, and their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

FLOATS = ("F32", "BF16", "F16")


class Expected(NamedTuple):
    """A tensor that a checkpoint must have."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    """The types that it may have, in safetensors' spelling."""
    other_shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes that are accepted besides `shape`."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of a checkpoint that together become part of a layer."""

    tensors: tuple[Expected, ...]
    store: Callable[[list[torch.Tensor]], None]
    """Stores the tensors, which are on a CPU or on the model's device and read-only. Raises ModelLoadError."""
    into: Callable[[], torch.Tensor] | None = None
    """Returns the model's memory, once it is allocated, for a single tensor that is kept unchanged. If the types
    differ, `store` converts it."""
