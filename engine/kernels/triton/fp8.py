"""Rounds a row to float8 where it is computed: `engine.models.linear.round_fp8`, without a kernel of its own."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_rounded(row, is_in, out, scale, INTERPRETED: tl.constexpr):
    """Write float32 `row` [BLOCK], zero where not `is_in`, as float8 numbers to `out`, and their scale.

    Numbers are divided, not multiplied by an inverse, so that they are those of the separate form bit for bit.
    None exceeds the largest float8 by more than rounding, so none is clamped; NaN stays NaN.
    """
    step = tl.div_rn(tl.maximum(tl.max(tl.abs(row), axis=0), 1e-12), 448.0)
    numbers = tl.div_rn(row, step)
    if INTERPRETED:  # Triton's interpreter rounds ties away from zero and loses carries, unlike GPUs.
        numbers = _to_nearest_even(numbers)
    tl.store(out, numbers.to(out.dtype.element_ty), mask=is_in)
    tl.store(scale, step)


@triton.jit
def _to_nearest_even(x):
    """Round float32 to numbers that float8_e4m3fn has: four significant bits, and steps of 2^-9 below 2^-6."""
    bits = x.to(tl.int32, bitcast=True)
    cut = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (x + 24576.0) - 24576.0  # 1.5 * 2^14, whose neighbours are 2^-9 apart
    return tl.where(tl.abs(x) < 0.015625, small, cut.to(tl.float32, bitcast=True))
