"""Linear layers of MXFP4 numbers (OCP Microscaling Formats 1.0), and the numbers of four bits by themselves.

    number = e2m1 * 2^(exponent - 127)     e2m1: a sign, two bits of exponent and one of mantissa: 0 to 6
                                           exponent: e8m0, eight bits for each output and 32 inputs; 255 is NaN

bfloat16 represents all of them exactly, except those of the exponents 253 and 254 that overflow float32 too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.layers.linear import BufferShape, QuantizedLinear, halves_packed, halves_unpacked
from engine.model_parts.formats import MXFP4_INPUTS

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the numbers of uint8 codes 0 to 15, float32 of the same shape."""
    numbers = (*_MAGNITUDES, *(-number for number in _MAGNITUDES))
    return torch.tensor(numbers, device=codes.device)[codes.int()]


def e2m1_pairs(pairs: torch.Tensor) -> torch.Tensor:
    """Return the codes of bytes [..., N] in files, the first of two in the low bits, as uint8 [..., 2 N]."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Return the powers of two of uint8 exponents, float32 of the same shape."""
    bits = exponents.int() << 23
    bits[exponents == 0] = 1 << 22  # 2^-127, which is not a normal number
    bits[exponents == 255] = 0x7FC00000  # NaN
    return bits.view(torch.float32)


class Mxfp4Linear(QuantizedLinear):
    """Four-bit codes [out, in / 2], packed by groups of 32 as in `Int4Linear`; exponents [in / 32, out]."""

    packed: torch.Tensor
    exponents: torch.Tensor

    @property
    def buffers_needed(self) -> dict[str, BufferShape]:
        """The buffers by name."""
        return {
            "packed": BufferShape((self.out_features, self.in_features // 2), torch.uint8),
            "exponents": BufferShape((self.in_features // MXFP4_INPUTS, self.out_features), torch.uint8),
        }

    def put(self, codes: torch.Tensor, exponents: torch.Tensor) -> None:
        """Store uint8 codes [out, in] and exponents [out, in / 32]."""
        self.packed.copy_(halves_packed(codes, MXFP4_INPUTS))
        self.exponents.copy_(exponents.t())

    def dequantized(self) -> torch.Tensor:
        """Return the weights as float32 [out, in]."""
        numbers = e2m1(halves_unpacked(self.packed, MXFP4_INPUTS)) * e8m0(self.exponents.t())[..., None]
        return numbers.flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, in] to [N, out] of the same type."""
        return F.linear(x, self.dequantized().to(x.dtype), self.bias)
