"""Rounds rows to float8, as `engine.layers.linear.round_fp8` does: where they are computed, or in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import launch
from engine.kernels.triton.launch_config import power_of_2
from engine.kernels.triton.tile import start

_MAX_WARPS = 32


@triton.jit
def store_rounded(row, is_in, out, scale, INPUTS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Write float32 `row` [BLOCK], zero where not `is_in`, as float8 numbers to `out`, and their scales: one, or
    one for each `INPUTS` numbers if these are not 0.

    Numbers are divided by the scale, not multiplied by its inverse, and the scale is multiplied by an inverse, not
    divided, so that results equal those of the separate form bit for bit. None exceeds the largest float8 by more
    than rounding, so none is clamped; NaN stays NaN.
    """
    if INPUTS == 0:
        step = tl.maximum(tl.max(tl.abs(row), axis=0), 1e-12) * (1.0 / 448.0)
        numbers = tl.div_rn(row, step)
        tl.store(scale, step)
    else:
        NUM: tl.constexpr = row.shape[0] // INPUTS
        blocks = tl.reshape(row, (NUM, INPUTS))
        step = tl.maximum(tl.max(tl.abs(blocks), axis=1), 1e-12) * (1.0 / 448.0)
        is_block = tl.max(tl.reshape(is_in.to(tl.int32), (NUM, INPUTS)), axis=1) > 0
        tl.store(scale + tl.arange(0, NUM), step, mask=is_block)
        numbers = tl.reshape(tl.div_rn(blocks, step[:, None]), row.shape)
    if INTERPRETED:  # Triton's interpreter rounds ties away from zero and loses carries, unlike GPUs.
        numbers = _to_nearest_even(numbers)
    tl.store(out, numbers.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _to_nearest_even(x):
    """Round float32 to numbers of float8_e4m3fn: four significant bits, and steps of 2^-9 below 2^-6."""
    bits = x.to(tl.int32, bitcast=True)
    cut = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (x + 24576.0) - 24576.0  # 1.5 * 2^14, whose neighbours are 2^-9 apart
    return tl.where(tl.abs(x) < 0.015625, small, cut.to(tl.float32, bitcast=True))


@triton.jit
def _round_rows(
    x_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    size,
    scales,
    INPUTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_in = at < size
    x = tl.load(x_ptr + row * x_stride + at, mask=is_in, other=0.0).to(tl.float32)
    store_rounded(x, is_in, out_ptr + row * size + at, scale_ptr + row * scales, INPUTS, INTERPRETED)


def rounded_like(
    rows: int, size: int, inputs: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return memory for rounded rows and for their scales, and the kernels' value of `inputs`: 0 for `size`, one
    scale for each row. Other numbers have to be powers of two that divide `size`.
    """
    out = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=device)
    shape = (rows,) if inputs == size else (rows, size // inputs)
    return out, torch.empty(shape, dtype=torch.float32, device=device), 0 if inputs == size else inputs


def round_rows(x: torch.Tensor, inputs: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows [N, size] to float8_e4m3fn; return them and their scales, float32 [N], or [N, size / inputs] for
    `inputs` numbers each. Rows are contiguous.
    """
    (rows, size), block = x.shape, power_of_2(x.shape[1])
    out, scale, each = rounded_like(rows, size, inputs or size, x.device)
    if rows:
        options = {
            "INPUTS": each,
            "INTERPRETED": not isinstance(_round_rows, triton.JITFunction),
            "BLOCK": block,
            "num_warps": min(max(block // 512, 1), _MAX_WARPS),
        }
        launch(_round_rows, (rows,), x, out, scale, x.stride(0), size, scale.stride(0), **options)
    return out, scale
