"""What the weights of a linear layer are: plain numbers (torch's own Linear), or fewer bits with scales.

    fp8     y = (x^ · W^T) · sx · sw     W^ float8_e4m3fn [out, in], sw for each output;
                                         x^ and sx: x, rounded likewise by each token's largest value
    int4    y = x · ((Q - z) · s)^T      Q of four bits [out, in], s and z for each output and group of inputs

On a GPU that multiplies fp8 (capability 8.9) torch does, elsewhere the same numbers are multiplied as plain ones.
Four bits are widened in the product by a Triton kernel for few rows, before it for many and without a GPU.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
KERNEL_ROWS = 64
"""Up to so many rows the int4 kernel, which reads a quarter of a matrix of 16 bits. For more, products take
longer: widening the matrix once costs less than doing it in each of the kernel's tiles."""


def round_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [R, C] to float8_e4m3fn and float32 scales [R] that give them back: x is about rounded * scale."""
    x = x.float()
    scale = x.abs().amax(-1).clamp(min=1e-12) / _FP8_MAX
    return (x / scale[:, None]).clamp(-_FP8_MAX, _FP8_MAX).to(FP8), scale


class QuantizedLinear(nn.Module):
    """A linear layer with scaled weights. `allocate` makes its buffers: until then it holds only the bias."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bias = plain.bias

    def allocate(self, device: torch.device) -> None:
        """Take the memory, with anything in it."""
        raise NotImplementedError


class Fp8Linear(QuantizedLinear):
    """Weights float8_e4m3fn [out, in], scales float32 [out]."""

    weight: torch.Tensor
    scale: torch.Tensor

    def allocate(self, device: torch.device) -> None:
        """Take the memory, with anything in it."""
        weight = torch.empty(self.out_features, self.in_features, dtype=FP8, device=device)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.empty(self.out_features, dtype=torch.float32, device=device))

    def put(self, rows: slice, values: torch.Tensor) -> None:
        """Round plain numbers [rows, in] into these rows."""
        self.weight[rows], self.scale[rows] = round_fp8(values)

    def dequantized(self) -> torch.Tensor:
        """float32 [out, in]."""
        return self.weight.float() * self.scale[:, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] to [N, out] of the same type."""
        rounded, scale = round_fp8(x)
        if x.is_cuda and _multiplies_fp8(x.device) and not (self.in_features % 16 or self.out_features % 16):
            product = torch._scaled_mm(  # scaled by rows it gives bfloat16 alone
                rounded,
                self.weight.t(),
                scale_a=scale[:, None],
                scale_b=self.scale[None],
                out_dtype=torch.bfloat16,
            ).to(x.dtype)
            return product if self.bias is None else product + self.bias
        restored = (rounded.float() * scale[:, None]).to(x.dtype)
        return F.linear(restored, self.dequantized().to(x.dtype), self.bias)


class Int4Linear(QuantizedLinear):
    """Codes [out, in / 2], scales and zero points [in / group, out].

    A byte holds two inputs of a group, of its first half in the low bits, of its second half in the high ones:

        packed[o, g * group / 2 + j] = Q[o, g * group + j] | Q[o, g * group + group / 2 + j] << 4

    So a tile of bytes is two tiles of weights, each for consecutive inputs.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    """float32: neither of the 16-bit types holds what is stored in the other."""
    zeros: torch.Tensor
    """uint8, 0 to 16."""

    def __init__(self, plain: nn.Linear, group_size: int) -> None:
        super().__init__(plain)
        self.group_size = group_size

    def allocate(self, device: torch.device) -> None:
        """Take the memory, with anything in it."""
        groups = self.in_features // self.group_size, self.out_features
        codes = self.out_features, self.in_features // 2
        self.register_buffer("packed", torch.empty(codes, dtype=torch.uint8, device=device))
        self.register_buffer("scales", torch.empty(groups, dtype=torch.float32, device=device))
        self.register_buffer("zeros", torch.empty(groups, dtype=torch.uint8, device=device))

    def put(self, rows: slice, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> None:
        """Pack uint8 codes [rows, in] into these rows; scales and zeros are [in / group, rows]."""
        halves = codes.unflatten(1, (-1, 2, self.group_size // 2))
        self.packed[rows] = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
        self.scales[:, rows], self.zeros[:, rows] = scales, zeros

    def dequantized(self) -> torch.Tensor:
        """float32 [out, in]."""
        pairs = self.packed.view(self.out_features, -1, 1, self.group_size // 2)
        codes = torch.cat((pairs & 15, pairs >> 4), 2).flatten(2).float()  # [out, groups, group]
        return ((codes - self.zeros.t()[:, :, None]) * self.scales.t()[:, :, None]).flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] to [N, out] of the same type."""
        if x.is_cuda and len(x) <= KERNEL_ROWS:
            from engine.kernels.triton.int4_gemm import int4_linear

            product = int4_linear(x, self.packed, self.scales, self.zeros, self.group_size)
            return product if self.bias is None else product + self.bias
        return F.linear(x, self.dequantized().to(x.dtype), self.bias)


@functools.cache
def _multiplies_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)
