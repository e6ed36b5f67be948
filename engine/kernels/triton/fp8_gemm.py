"""Multiplies float8 matrices with a scale for each block of weights and each run of a row's inputs (DeepSeek-V3).

    y[m, n] = sum over blocks b of 128 inputs    (x^[m, b] · w^[n, b]) * sx[m, b] * sw[n / rows, b]

A block's product is summed in the tensor cores, and the blocks' products in float32 outside. The precision that
the tensor cores of Hopper GPUs lose in a long sum (arXiv:2412.19437, section 3.3.2) is thus only that of 128
products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.float8 import BLOCK_INPUTS
from engine.kernels.triton.few_rows import MAX_ROWS, fp8_few_rows
from engine.kernels.triton.launch import launch
from engine.kernels.triton.tile import is_interpreted, start

_FEW, _MANY = (64, 64, 4, 4), (128, 128, 8, 3)
"""Rows, outputs, warps and stages of a program: for decodes, which are bound by reading, and for prompts."""
_FEW_ROWS = 64
"""Maximum number of rows for programs of few rows."""


def fp8_block_linear(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply float8_e4m3fn [M, K] with [N, K] to [M, N] of `dtype`.

    x_scale: float32 [M, K / 128]; scale: float32 [N / rows, K / 128], of any number of `rows` that divides N. K is
    a multiple of 128. All are contiguous.
    """
    (num_rows, inputs), outputs = x.shape, len(weight)
    if num_rows <= MAX_ROWS:
        return fp8_few_rows(x, x_scale, weight, scale, None, dtype)
    block_m, block_n, num_warps, num_stages = _FEW if num_rows <= _FEW_ROWS else _MANY
    out = torch.empty(num_rows, outputs, dtype=dtype, device=x.device)
    launch(
        _block_gemm,
        (-(-outputs // block_n), -(-num_rows // block_m)),
        x,
        x_scale,
        weight,
        scale,
        out,
        num_rows,
        outputs,
        inputs,
        SCALE_ROWS=outputs // len(scale),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=BLOCK_INPUTS,
        INTERPRETED=is_interpreted(_block_gemm),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _block_gemm(
    x,
    x_scale,
    weight,
    scale,
    out,
    num_rows,
    outputs,
    inputs,
    SCALE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < outputs
    step = tl.arange(0, BLOCK_K)
    dot_type: tl.constexpr = tl.float32 if INTERPRETED else x.dtype.element_ty
    num_blocks = inputs // BLOCK_K
    x_at = x + rows.to(tl.int64)[:, None] * inputs + step[None, :]
    w_at = weight + columns.to(tl.int64)[:, None] * inputs + step[None, :]
    x_scales = x_scale + rows.to(tl.int64) * num_blocks
    scales = scale + columns // SCALE_ROWS * num_blocks
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(num_blocks):
        part = tl.load(x_at + block * BLOCK_K, mask=is_row[:, None], other=0.0).to(dot_type)
        weights = tl.load(w_at + block * BLOCK_K, mask=is_column[:, None], other=0.0).to(dot_type)
        theirs = tl.load(x_scales + block, mask=is_row, other=0.0)
        own = tl.load(scales + block, mask=is_column, other=0.0)
        product = tl.dot(part, tl.trans(weights), input_precision="ieee")
        total += product * theirs[:, None] * own[None, :]
    place = rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
