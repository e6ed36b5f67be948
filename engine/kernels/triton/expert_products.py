"""Multiplies a tile of rows with some outputs of one expert's matrix, for each kind of matrix in memory.

    plain    x @ w^T                                    16 or 32 bits
    fp8      (x^ @ w^T) * sx * sw                       a scale for each output and each row of x
    blocks   sum over blocks of 128 inputs of the same, each block with its own scales
    int4     sum over groups of inputs of (x @ (q - z)^T) * s
    mxfp4    x @ (e2m1 * 2^e)^T, exact in bfloat16, with an e for each output and 32 inputs

Four bits are widened in registers. A GPU without float8 products gets plain x, no sx, and float8 weights as bytes,
which are widened in registers too. Sums are float32. A matrix has the parts of the linear layer of its kind
(`engine.layers.linear`, `engine.layers.mxfp4_linear`), whose names identify the kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from engine.kernels.float8 import BLOCK_INPUTS, BLOCK_OUTPUTS, makes_fp8
from engine.kernels.triton.fp8 import round_rows
from engine.kernels.triton.int4_gemm import MAX_BLOCK_J
from engine.model_parts.formats import MXFP4_INPUTS

_PLAIN, _FP8, _BLOCKS, _INT4, _MXFP4 = (tl.constexpr(kind) for kind in range(5))
_MOST_COLUMNS_OF_FOUR_BITS = 128
_E2M1_WIDENING = tl.constexpr(2.0**126)
"""Factor of e2m1's bits at their place in float32: 2^(127 - 1), for the biases."""
_BLOCK_OUTPUTS = tl.constexpr(BLOCK_OUTPUTS)
_WIDENING = tl.constexpr(2.0**120)
"""Factor of float8_e4m3fn's bits at their place in float32: 2^(127 - 7), for the biases."""


class Stacked(Protocol):
    """The matrices of all experts, in the form of linear layers of one kind (`engine.layers.matrix_stack`)."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Tensors of all experts, [E, ...], by their names in the layers."""


class ExpertMatrices(NamedTuple):
    """The matrices of all experts as arguments of kernels. All tensors are contiguous."""

    kind: int
    weight: torch.Tensor
    """[E, outputs, ...]; float8 as bytes if it has to be widened."""
    scale: torch.Tensor | None
    """float32; exponents (uint8) in MXFP4."""
    zero: torch.Tensor | None
    outputs: int
    inputs: int
    group: int
    """Inputs that share a scale."""

    @classmethod
    def of(cls, matrices: torch.Tensor | Stacked, device: torch.device) -> ExpertMatrices:
        """Return these matrices, [E, outputs, inputs], as arguments of kernels on such a device."""
        if isinstance(matrices, torch.Tensor):
            return cls._plain(matrices)
        tensors = matrices.tensors
        if "exponents" in tensors:
            packed, exponents = tensors["packed"], tensors["exponents"]
            outputs, inputs = packed.shape[1], 2 * packed.shape[2]
            return cls(_MXFP4.value, packed, exponents, None, outputs, inputs, MXFP4_INPUTS)
        if "packed" in tensors:
            packed, scales, zeros = tensors["packed"], tensors["scales"], tensors["zeros"]
            outputs, inputs = packed.shape[1], 2 * packed.shape[2]
            return cls(_INT4.value, packed, scales, zeros, outputs, inputs, inputs // scales.shape[1])
        weight = tensors["weight"]
        if "scale" not in tensors:
            return cls._plain(weight)
        _, outputs, inputs = weight.shape
        scale = tensors["scale"]
        is_blocked = scale.ndim == 3
        if not makes_fp8(device):
            weight = weight.view(torch.uint8)
        kind, group = (_BLOCKS.value, BLOCK_INPUTS) if is_blocked else (_FP8.value, inputs)
        return cls(kind, weight, scale, None, outputs, inputs, group)

    @classmethod
    def _plain(cls, weight: torch.Tensor) -> ExpertMatrices:
        _, outputs, inputs = weight.shape
        return cls(_PLAIN.value, weight, None, None, outputs, inputs, inputs)

    def rounded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return rows [N, inputs] in the form for these matrices: with scales, if they are rounded."""
        if self.weight.dtype != torch.float8_e4m3fn:
            return x, None
        return round_rows(x.contiguous(), None if self.kind == _FP8.value else self.group)

    @property
    def has_four_bits(self) -> bool:
        """Whether a byte holds two numbers."""
        return self.kind in (_INT4.value, _MXFP4.value)

    def columns_each(self, columns: int) -> int:
        """Return the number of outputs of a program, at most `columns`, because widening takes registers too."""
        return min(columns, _MOST_COLUMNS_OF_FOUR_BITS) if self.has_four_bits else columns

    def step(self, bytes_of_inputs: int, element_size: int) -> int:
        """Return how many inputs, or bytes of four bits, are multiplied together, given a bound on their bytes."""
        if self.kind == _INT4.value:
            return math.gcd(self.group // 2, MAX_BLOCK_J)
        if self.kind == _MXFP4.value:
            return MAX_BLOCK_J
        return BLOCK_INPUTS if self.kind == _BLOCKS.value else bytes_of_inputs // element_size

    def step_bytes(self, rows: int, columns: int, step: int, element_size: int) -> int:
        """Return the bytes of rows and weights that are multiplied together."""
        halves = 2 if self.has_four_bits else 1
        return (rows * halves * element_size + columns * self.weight.element_size()) * step


@triton.jit
def multiplied(
    x,
    x_scale,
    rows,  # int64 [R]
    is_row,
    x_stride,
    weight,  # the first expert's
    scale,
    zero,
    expert,  # int64
    columns,  # [C]
    is_column,
    outputs,
    inputs,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return float32 [R, C]: these rows times these outputs of an expert's matrix.

    With less than 64 rows the product is transposed: weights then fill the tensor cores' 64 rows, as in
    `few_rows`.
    """
    # Triton's interpreter multiplies bfloat16 wrongly, so it uses float32.
    dot_type: tl.constexpr = tl.float32 if INTERPRETED else x.dtype.element_ty
    TURNED: tl.constexpr = rows.shape[0] < 64
    step = tl.arange(0, STEP)
    x_at = x + rows[:, None] * x_stride + step[None, :]
    own_rows = expert * outputs + columns.to(tl.int64)
    is_weight = is_column[:, None]
    if TURNED:
        total = tl.zeros((columns.shape[0], rows.shape[0]), tl.float32)
    else:
        total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    if KIND == _INT4:
        HALF: tl.constexpr = GROUP // 2
        num_groups = inputs // GROUP
        packed = weight + own_rows[:, None] * (inputs // 2) + step[None, :]
        first_scale = expert * num_groups * outputs + columns
        for group in range(num_groups):
            own = tl.load(scale + first_scale + group * outputs, is_column, 0.0)
            middle = tl.load(zero + first_scale + group * outputs, is_column, 0).to(tl.int32)[:, None]
            product = tl.zeros(total.shape, tl.float32)
            for first in range(0, HALF, STEP):
                both = tl.load(packed + (group * HALF + first), is_weight, 0).to(tl.int32)
                low = tl.load(x_at + (group * GROUP + first), is_row[:, None], 0.0).to(dot_type)
                high = tl.load(x_at + (group * GROUP + HALF + first), is_row[:, None], 0.0).to(dot_type)
                product = _added(product, low, ((both & 15) - middle).to(dot_type), TURNED)
                product = _added(product, high, ((both >> 4) - middle).to(dot_type), TURNED)
            total += product * _of_columns(own, TURNED)
    elif KIND == _MXFP4:
        BYTES: tl.constexpr = GROUP // 2
        num_bytes = inputs // 2
        packed = weight + own_rows[:, None] * num_bytes + step[None, :]
        low_at = x + rows[:, None] * x_stride + (step // BYTES * GROUP + step % BYTES)[None, :]
        group = tl.arange(0, STEP // BYTES)
        num_groups = inputs // GROUP
        exponents = scale + (expert * num_groups + group[None, :]) * outputs + columns[:, None]
        for first in range(0, num_bytes, STEP):
            is_byte = (first + step < num_bytes)[None, :]
            is_group = (first // BYTES + group < num_groups)[None, :]
            both = tl.load(packed + first, is_weight & is_byte, 0).to(tl.int32)
            own = _power_of_2(tl.load(exponents + first // BYTES * outputs, is_weight & is_group, 0))
            each = tl.broadcast_to(own[:, :, None], (columns.shape[0], STEP // BYTES, BYTES))
            powers = tl.reshape(each, (columns.shape[0], STEP))
            low = tl.load(low_at + 2 * first, is_row[:, None] & is_byte, 0.0).to(dot_type)
            high = tl.load(low_at + (2 * first + BYTES), is_row[:, None] & is_byte, 0.0).to(dot_type)
            total = _added(total, low, (_e2m1(both & 15) * powers).to(dot_type), TURNED)
            total = _added(total, high, (_e2m1(both >> 4) * powers).to(dot_type), TURNED)
    elif KIND == _BLOCKS:
        num_blocks = inputs // STEP
        w_at = weight + own_rows[:, None] * inputs + step[None, :]
        scales = scale + own_rows // _BLOCK_OUTPUTS * num_blocks
        for block in range(num_blocks):
            part = tl.load(x_at + block * STEP, is_row[:, None], 0.0).to(dot_type)
            numbers = _widened(tl.load(w_at + block * STEP, is_weight, 0.0), dot_type)
            own = tl.load(scales + block, is_column, 0.0)
            product = _added(tl.zeros(total.shape, tl.float32), part, numbers, TURNED)
            if x_scale is not None:
                theirs = tl.load(x_scale + rows * num_blocks + block, is_row, 0.0)
                product *= _of_columns(theirs, not TURNED)
            total += product * _of_columns(own, TURNED)
    else:
        w_at = weight + own_rows[:, None] * inputs + step[None, :]
        for first in range(0, inputs, STEP):
            is_input = (first + step < inputs)[None, :]
            part = tl.load(x_at + first, is_row[:, None] & is_input, 0.0).to(dot_type)
            numbers = tl.load(w_at + first, is_weight & is_input, 0.0)
            total = _added(total, part, _widened(numbers, dot_type), TURNED)
        if KIND == _FP8:
            total *= _of_columns(tl.load(scale + own_rows, is_column, 0.0), TURNED)
            if x_scale is not None:
                total *= _of_columns(tl.load(x_scale + rows, is_row, 0.0), not TURNED)
    if TURNED:
        total = tl.trans(total)
    return total


@triton.jit
def _added(total, part, weights, TURNED: tl.constexpr):
    """Return `total` plus the product of rows [R, K] and weights [C, K]: [C, R] if transposed, else [R, C]."""
    if TURNED:
        return tl.dot(weights, tl.trans(part), total, input_precision="ieee")
    else:
        return tl.dot(part, tl.trans(weights), total, input_precision="ieee")


@triton.jit
def _of_columns(scales, TURNED: tl.constexpr):
    """Return scales of a product's columns (of its rows if `TURNED`) in the shape that multiplies it."""
    if TURNED:
        return scales[:, None]
    else:
        return scales[None, :]


@triton.jit
def _e2m1(codes):
    """Return the numbers of codes of four bits, float32."""
    place = ((codes & 8) << 28) | ((codes & 7) << 22)
    return place.to(tl.float32, bitcast=True) * _E2M1_WIDENING


@triton.jit
def _power_of_2(exponents):
    """Return 2^(exponent - 127), float32. 255 is NaN, and the power of 0 is not a normal number."""
    bits = exponents.to(tl.int32) << 23
    bits = tl.where(exponents == 0, 1 << 22, tl.where(exponents == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _widened(numbers, dot_type: tl.constexpr):
    """Return numbers as `dot_type`; bytes are float8_e4m3fn."""
    if numbers.dtype == tl.uint8:
        bits = numbers.to(tl.int32)
        place = ((bits & 128) << 24) | ((bits & 127) << 20)
        return (place.to(tl.float32, bitcast=True) * _WIDENING).to(dot_type)
    else:
        return numbers.to(dot_type)
