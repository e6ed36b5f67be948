"""Linear layers, and tables, whose numbers are codes of a few bits: 16 or 32 inputs of an output share a scale.

    y = x · (Q · s + m)^T      Q [out, in] of 4 or 8 bits, s and perhaps m for each output and group of inputs

Only the native kernels compute with them (`engine/kernels/native/blocks.c`), and pack them into less memory than
here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from engine.layers.linear import BufferShape, QuantizedLinear


class Grouping(NamedTuple):
    """The format of codes and their scales."""

    bits: int
    """Bits of a code: 4 (0 to 15 or, without least values, -8 to 7) or 8 (-128 to 127)."""
    inputs: int
    """Inputs that share a scale: 16 or 32."""
    scale_bytes: int
    """2: float16; 4: float32."""
    has_leasts: bool
    """Whether a number is scale * code + least, or scale * code."""

    @property
    def scale_type(self) -> torch.dtype:
        """The type of scales and least values."""
        return torch.float16 if self.scale_bytes == 2 else torch.float32

    @property
    def block_bytes(self) -> int:
        """Bytes of 32 inputs of 32 outputs in the native kernels' memory."""
        return 128 * self.bits + 1024 // self.inputs * self.scale_bytes * (1 + self.has_leasts)


def joined(kinds: Iterable[Grouping]) -> Grouping:
    """Return the smallest grouping that can hold the numbers of all these groupings exactly."""
    bits, inputs, scale_bytes, leasts = (set(each) for each in zip(*kinds, strict=True))
    fits = max(bits) == 4 and len(leasts) == 1  # least values change the range of four-bit codes
    return Grouping(4 if fits else 8, min(inputs), max(scale_bytes), max(leasts))


class Coded(NamedTuple):
    """Numbers as codes, in groups of 16 or 32."""

    codes: torch.Tensor
    """uint8 or int8 [..., numbers of a group]."""
    scales: torch.Tensor
    """float32 [...]. The product of a code and its scale is exact in float32."""
    leasts: torch.Tensor | None
    """float32 [...]; None: zeros."""

    def widened(self) -> torch.Tensor:
        """Return the numbers, float32 of the codes' shape."""
        product = self.codes.float().mul_(self.scales[..., None])
        return product if self.leasts is None else product.add_(self.leasts[..., None])


class GroupedLinear(QuantizedLinear):
    """Codes int8 [out, in]; scales and least values [out, in / group]."""

    codes: torch.Tensor
    scales: torch.Tensor
    leasts: torch.Tensor
    """Empty if the grouping has no least values."""

    def __init__(self, plain: nn.Linear, grouping: Grouping) -> None:
        super().__init__(plain)
        self.grouping = grouping

    @property
    def buffers_needed(self) -> dict[str, BufferShape]:
        """The buffers by name."""
        grouping, outputs = self.grouping, self.out_features
        groups = self.in_features // grouping.inputs
        return {
            "codes": BufferShape((outputs, self.in_features), torch.int8),
            "scales": BufferShape((outputs, groups), grouping.scale_type),
            "leasts": BufferShape((outputs, groups if grouping.has_leasts else 0), grouping.scale_type),
        }

    @property
    def packed_bytes(self) -> int:
        """Bytes of the matrix in the native kernels' memory: whole panels of 32 outputs."""
        return -(-self.out_features // 32) * (self.in_features // 32) * self.grouping.block_bytes

    def put(self, rows: slice, coded: Coded) -> None:
        """Store numbers of some rows, [rows, in] in all."""
        codes, repeats = coded.codes, coded.codes.shape[-1] // self.grouping.inputs
        outputs = codes.numel() // self.in_features
        self.codes[rows] = codes.view(torch.int8).view(outputs, -1)
        self.scales[rows] = coded.scales.view(outputs, -1).repeat_interleave(repeats, 1)
        if self.grouping.has_leasts:
            leasts = torch.zeros_like(coded.scales) if coded.leasts is None else coded.leasts
            self.leasts[rows] = leasts.view(outputs, -1).repeat_interleave(repeats, 1)

    def dequantized(self) -> torch.Tensor:
        """Return the weights as float32 [out, in]."""
        codes = self.codes.unflatten(1, (-1, self.grouping.inputs))
        leasts = self.leasts.float() if self.grouping.has_leasts else None
        return Coded(codes, self.scales.float(), leasts).widened().flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, in] to [N, out] of the same type."""
        return nn.functional.linear(x, self.dequantized().to(x.dtype), self.bias)
