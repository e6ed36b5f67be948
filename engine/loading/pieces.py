"""What is read of a checkpoint, what it must look like, and where it goes: the unit of loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

FLOATS = ("F32", "BF16", "F16")


class Expected(NamedTuple):
    """A tensor that a checkpoint must have."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    """Any of these, as safetensors spells them."""
    other_shapes: tuple[tuple[int, ...], ...] = ()
    """As good as `shape`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tensors of a checkpoint that together become part of a layer."""

    tensors: tuple[Expected, ...]
    store: Callable[[list[torch.Tensor]], None]
    """Takes them, on a CPU or on the model's device, only to be read from. Raises ModelLoadError."""
    into: Callable[[], torch.Tensor] | None = None
    """Memory of the model that is to hold the only tensor as it is, once that is allocated; converted where types
    differ, which `store` does."""
