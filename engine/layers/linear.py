"""Linear layers with quantized weights: fewer bits per weight, and scales. Plain layers are torch's Linear.

    fp8     y = (x^ · W^T) · sx · sw     W^ float8_e4m3fn [out, in], sw for each output;
                                         x^ and sx: x, rounded likewise by each token's largest value
    blocks  the same, summed over blocks of 128 inputs, each with an sx and, for every 32 or more outputs, an sw
    int4    y = x · ((Q - z) · s)^T      Q of four bits [out, in], s and z for each output and group of inputs

A GPU with fp8 products (capability 8.9) multiplies in fp8; elsewhere the same numbers are widened first.
Four-bit weights are widened inside the product by a Triton kernel for few rows on a GPU, and before it otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.float8 import BLOCK_INPUTS, BLOCK_OUTPUTS, multiplies_fp8

FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
KERNEL_ROWS = 64
"""Maximum number of rows for the int4 kernel, which reads a quarter of the bytes of a 16-bit matrix. For more
rows, widening the matrix once costs less than widening it in each of the kernel's tiles."""


def round_fp8(x: torch.Tensor, inputs: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows [R, C] to float8_e4m3fn; return them and float32 scales, with x about rounded * scale: [R], or
    [R, C / inputs] if `inputs` is less than C.
    """
    size = x.shape[-1]
    blocks = x.float().unflatten(-1, (-1, inputs or size))
    # Torch on GPUs multiplies by a number's inverse, so kernels and CPUs do so too.
    scale = blocks.abs().amax(-1).clamp(min=1e-12) * (1 / _FP8_MAX)
    rounded = (blocks / scale[..., None]).clamp_(-_FP8_MAX, _FP8_MAX).to(FP8)
    return rounded.flatten(-2), scale[..., 0] if inputs in (None, size) else scale


class Rounded(NamedTuple):
    """Numbers [R, C] that were rounded to float8 where they were computed, for a layer that `rounds`."""

    numbers: torch.Tensor
    """float8_e4m3fn [R, C]."""
    scale: torch.Tensor
    """float32 [R], or [R, blocks of C]."""
    dtype: torch.dtype
    """Their type before rounding."""

    @classmethod
    def of(cls, x: torch.Tensor, inputs: int) -> Rounded:
        """Round plain numbers, [R, C], `inputs` of which share a scale; in one kernel on GPUs that support it."""
        if x.is_cuda and multiplies_fp8(x.device):
            from engine.kernels.triton.fp8 import round_rows

            return cls(*round_rows(x.contiguous(), inputs), x.dtype)
        return cls(*round_fp8(x, inputs), x.dtype)

    def restored(self) -> torch.Tensor:
        """Return the numbers that these stand for, [R, C]."""
        scale = self.scale if self.scale.ndim == 2 else self.scale[:, None]
        blocks: torch.Tensor = self.numbers.float().unflatten(1, (scale.shape[1], -1)) * scale[..., None]
        return blocks.flatten(1).to(self.dtype)


def rounds(layer: object) -> int:
    """Return how many inputs share a scale in a layer that rounds its inputs, and so accepts rounded ones; 0 for
    other layers.
    """
    if isinstance(layer, Fp8BlockLinear):
        return BLOCK_INPUTS
    return layer.in_features if isinstance(layer, Fp8Linear) else 0


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, few_rows: frozenset[int]
) -> torch.Tensor:
    """Map [N, in] to [N, out]; by our kernel for few rows if N is in `few_rows`, which is empty except on GPUs."""
    if len(x) in few_rows and x.is_cuda and x.stride(1) == 1:
        from engine.kernels.triton.few_rows import plain_few_rows

        return plain_few_rows(x, weight, bias)
    return F.linear(x, weight, bias)


class PlainLinear(nn.Module):
    """A linear layer of plain numbers, for which the best GPU kernel for few rows was measured."""

    def __init__(self, plain: nn.Linear, few_rows: frozenset[int]) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.few_rows = few_rows
        """Numbers of rows for which our own kernel is faster than the library's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, in] to [N, out]."""
        return multiply(x, self.weight, self.bias, self.few_rows)


class BufferShape(NamedTuple):
    """The shape and the type of a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class QuantizedLinear(nn.Module):
    """A linear layer with scaled weights. It holds only the bias until `allocate`, or the stack of matrices that
    it is one of (`engine.layers.matrix_stack`), makes its buffers.
    """

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bias = plain.bias

    @property
    def buffers_needed(self) -> dict[str, BufferShape]:
        """The buffers by name."""
        raise NotImplementedError

    def allocate(self, device: torch.device) -> None:
        """Allocate the buffers, uninitialized."""
        for name, (shape, dtype) in self.buffers_needed.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device=device))


class Fp8Linear(QuantizedLinear):
    """Weights float8_e4m3fn [out, in], scales float32 [out]."""

    weight: torch.Tensor
    scale: torch.Tensor
    few_rows: frozenset[int] = frozenset()
    """As `PlainLinear.few_rows`."""

    @property
    def buffers_needed(self) -> dict[str, BufferShape]:
        """The buffers by name."""
        return {
            "weight": BufferShape((self.out_features, self.in_features), FP8),
            "scale": BufferShape((self.out_features,), torch.float32),
        }

    def put(self, rows: slice, values: torch.Tensor) -> None:
        """Round plain numbers [rows, in] and store them in these rows."""
        self.weight[rows], self.scale[rows] = round_fp8(values)

    def dequantized(self) -> torch.Tensor:
        """Return the weights as float32 [out, in]."""
        return self.weight.float() * self.scale[:, None]

    def forward(self, x: torch.Tensor | Rounded) -> torch.Tensor:
        """Map [N, in] to [N, out] of the same type."""
        x = x if isinstance(x, Rounded) else Rounded.of(x, self.in_features)
        rounded, scale, dtype = x
        if rounded.is_cuda and len(rounded) in self.few_rows:
            from engine.kernels.triton.few_rows import fp8_few_rows

            return fp8_few_rows(rounded, scale, self.weight, self.scale, self.bias, dtype)
        if (
            rounded.is_cuda
            and multiplies_fp8(rounded.device)
            and not (self.in_features % 16 or self.out_features % 16)
        ):
            product = torch._scaled_mm(  # With scales per row, its only output type is bfloat16.
                rounded,
                self.weight.t(),
                scale_a=scale[:, None],
                scale_b=self.scale[None],
                out_dtype=torch.bfloat16,
                use_fast_accum=True,  # Summed only in the tensor cores, with fewer bits than float32.
            ).to(dtype)
            return product if self.bias is None else product + self.bias
        return F.linear(x.restored(), self.dequantized().to(dtype), self.bias)


class Fp8BlockLinear(QuantizedLinear):
    """Weights float8_e4m3fn [out, in], scales float32 [out / 32, in / 128]: those of a checkpoint's blocks of 128
    inputs, repeated for each 32 outputs, so that projections and ranks may divide blocks of outputs.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    @property
    def buffers_needed(self) -> dict[str, BufferShape]:
        """The buffers by name."""
        blocks = self.out_features // BLOCK_OUTPUTS, self.in_features // BLOCK_INPUTS
        return {
            "weight": BufferShape((self.out_features, self.in_features), FP8),
            "scale": BufferShape(blocks, torch.float32),
        }

    def dequantized(self) -> torch.Tensor:
        """Return the weights as float32 [out, in]."""
        return self.weight.float() * self.scale.repeat_interleave(BLOCK_OUTPUTS, 0).repeat_interleave(
            BLOCK_INPUTS, 1
        )

    def forward(self, x: torch.Tensor | Rounded) -> torch.Tensor:
        """Map [N, in] to [N, out] of the same type."""
        x = x if isinstance(x, Rounded) else Rounded.of(x, BLOCK_INPUTS)
        if x.numbers.is_cuda and multiplies_fp8(x.numbers.device):
            from engine.kernels.triton.fp8_gemm import fp8_block_linear

            product = fp8_block_linear(x.numbers, x.scale, self.weight, self.scale, x.dtype)
            return product if self.bias is None else product + self.bias
        return F.linear(x.restored(), self.dequantized().to(x.dtype), self.bias)


def halves_packed(codes: torch.Tensor, group: int) -> torch.Tensor:
    """Pack uint8 codes Q of four bits, [out, in], into [out, in / 2].

    A byte holds two inputs of a group: one of the first half in the low bits, one of the second in the high bits:

        packed[o, g * group / 2 + j] = Q[o, g * group + j] | Q[o, g * group + group / 2 + j] << 4

    A tile of bytes is thus two tiles of weights, each for consecutive inputs.
    """
    low, high = codes.unflatten(1, (-1, 2, group // 2)).unbind(2)
    packed: torch.Tensor = low | high << 4
    return packed.flatten(1)


def halves_unpacked(packed: torch.Tensor, group: int) -> torch.Tensor:
    """Return the codes that `halves_packed` packed, [out, in / group, group]."""
    pairs = packed.unflatten(1, (-1, 1, group // 2))
    return torch.cat((pairs & 15, pairs >> 4), 2).flatten(2)


class Int4Linear(QuantizedLinear):
    """Four-bit codes [out, in / 2], packed by groups; scales and zero points [in / group, out]."""

    packed: torch.Tensor
    scales: torch.Tensor
    """float32, because neither 16-bit type can represent the other's values."""
    zeros: torch.Tensor
    """uint8, 0 to 16."""

    def __init__(self, plain: nn.Linear, group_size: int) -> None:
        super().__init__(plain)
        self.group_size = group_size

    @property
    def buffers_needed(self) -> dict[str, BufferShape]:
        """The buffers by name."""
        groups = self.in_features // self.group_size, self.out_features
        return {
            "packed": BufferShape((self.out_features, self.in_features // 2), torch.uint8),
            "scales": BufferShape(groups, torch.float32),
            "zeros": BufferShape(groups, torch.uint8),
        }

    def put(self, rows: slice, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> None:
        """Pack uint8 codes [rows, in] into these rows; scales and zeros are [in / group, rows]."""
        self.packed[rows] = halves_packed(codes, self.group_size)
        self.scales[:, rows], self.zeros[:, rows] = scales, zeros

    def dequantized(self) -> torch.Tensor:
        """Return the weights as float32 [out, in]."""
        codes = halves_unpacked(self.packed, self.group_size).float()
        return ((codes - self.zeros.t()[:, :, None]) * self.scales.t()[:, :, None]).flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, in] to [N, out] of the same type."""
        if x.is_cuda and len(x) <= KERNEL_ROWS:
            from engine.kernels.triton.int4_gemm import int4_linear

            product = int4_linear(x, self.packed, self.scales, self.zeros, self.group_size)
            return product if self.bias is None else product + self.bias
        return F.linear(x, self.dequantized().to(x.dtype), self.bias)
