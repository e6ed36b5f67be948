"""Widens experts from MXFP4 (OCP Microscaling Formats 1.0): 32 numbers of four bits and an exponent.

NAME_blocks  uint8 [experts, outputs, inputs / 32, 16]   two numbers a byte, the first in the low bits
NAME_scales  uint8 [experts, outputs, inputs / 32]       exponents, plus 127
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.loading.target_parts import WeightTarget
from engine.loading.tensor_groups import Expected, TensorGroup

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 32
"""Numbers that share an exponent."""


def mxfp4_group(name: str, target: WeightTarget, into: Callable[[], torch.Tensor]) -> TensorGroup:
    """Return the tensors of a stack of experts; `target` is that of plain numbers, [E, inputs, outputs]."""
    count, inputs, outputs = target.shape
    blocks = Expected(f"{name}_blocks", (count, outputs, inputs // BLOCK, BLOCK // 2), ("U8",))
    scales = Expected(f"{name}_scales", (count, outputs, inputs // BLOCK), ("U8",))
    return TensorGroup((blocks, scales), partial(_store, into, target))


def widened(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 [outputs, inputs] of one expert's blocks and scales."""
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), device=blocks.device)
    numbers = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), -1).flatten(-2)
    return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2)


def _store(into: Callable[[], torch.Tensor], target: WeightTarget, tensors: list[torch.Tensor]) -> None:
    """Widen expert by expert, so that memory holds only one of them twice."""
    blocks, scales = tensors
    held, *part = target.part
    experts = range(len(blocks))[held] if isinstance(held, slice) else held.tolist()
    for own, expert in zip(into(), experts, strict=True):
        own.copy_(widened(blocks[expert], scales[expert]).t()[tuple(part)].t())
