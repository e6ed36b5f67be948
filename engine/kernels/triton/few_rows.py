"""Multiplies a few rows with a matrix of weights, where reading it takes nearly all the time (split-K GEMV).

    a program: BLOCK_N outputs of all rows, a share of the inputs        result^T = W @ x^T

The weights are the first operand, so that they fill the tensor cores' 64 rows and 8 rows of x need no padding. The
program that finishes last sums the shares (`engine.kernels.triton.split_k`).

    plain    16 or 32 bits
    fp8      y = (W^ · x^^T) · sw · sx            a scale for each output and each row of x
    blocks   y = sum over blocks of 128 inputs    of the same, each block with its own scales
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.float8 import BLOCK_INPUTS
from engine.kernels.triton.launch import launch
from engine.kernels.triton.split_k import counters, num_shares, sum_shares
from engine.kernels.triton.tile import is_interpreted, start

MAX_ROWS = 8
"""Maximum number of rows."""
_BLOCK_N = 64
_BLOCK_BYTES = 256
"""Bytes of an output's weights that are read together; those of a block, if there are blocks."""


def plain_few_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply [M, K] with [N, K] to [M, N] of x's type, summed in float32. x may have any row stride."""
    return _launch(x, weight, None, None, bias, x.dtype, 1)


def fp8_few_rows(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply float8_e4m3fn [M, K] with [N, K] to [M, N] of `dtype`. Scales are float32: [M] and [N], or for
    blocks [M, K / 128] and [N / rows, K / 128], of any number of `rows` that divides N.
    """
    return _launch(x, weight, x_scale, scale, bias, dtype, len(weight) // len(scale))


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor | None,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    scale_rows: int,
) -> torch.Tensor:
    (num_rows, inputs), outputs = x.shape, len(weight)
    is_blocked = scale is not None and scale.ndim == 2
    block_k = BLOCK_INPUTS if is_blocked else _BLOCK_BYTES // weight.element_size()
    tiles, steps = -(-outputs // _BLOCK_N), -(-inputs // block_k)
    shares = num_shares(tiles, steps)
    out = torch.empty(num_rows, outputs, dtype=dtype, device=x.device)
    partial = out
    if shares > 1:
        partial = torch.empty(shares, outputs, MAX_ROWS, dtype=torch.float32, device=x.device)
    launch(
        _few_rows,
        (tiles, shares),
        x,
        weight,
        x_scale,
        scale,
        bias,
        out,
        partial,
        counters(x.device),
        num_rows,
        outputs,
        inputs,
        x.stride(0),
        weight.stride(0),
        STEPS=-(-steps // shares),
        SHARES=-(-steps // -(-steps // shares)),
        SCALE_ROWS=scale_rows,
        HAS_SCALES=scale is not None,
        IS_BLOCKED=is_blocked,
        HAS_BIAS=bias is not None,
        BLOCK_M=MAX_ROWS,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=block_k,
        INTERPRETED=is_interpreted(_few_rows),
        num_warps=4,
        num_stages=4,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x,
    weight,
    x_scale,
    scale,
    bias,
    out,
    partial,
    arrived,
    num_rows,
    outputs,
    inputs,
    x_row,
    w_row,
    STEPS: tl.constexpr,
    SHARES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    tile, share = tl.program_id(0), tl.program_id(1)
    if share >= SHARES:
        return
    rows = tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < outputs
    step = tl.arange(0, BLOCK_K)
    # Triton's interpreter multiplies bfloat16 wrongly, so it uses float32.
    dot_type: tl.constexpr = tl.float32 if INTERPRETED else x.dtype.element_ty
    x_rows = x + rows.to(tl.int64)[:, None] * x_row
    w_rows = weight + columns.to(tl.int64)[:, None] * w_row
    num_blocks = tl.cdiv(inputs, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(share * STEPS, tl.minimum((share + 1) * STEPS, num_blocks)):
        at = block * BLOCK_K + step
        is_input = (at < inputs)[None, :]
        weights = tl.load(w_rows + at[None, :], mask=is_column[:, None] & is_input, other=0.0).to(dot_type)
        part = tl.load(x_rows + at[None, :], mask=is_row[:, None] & is_input, other=0.0).to(dot_type)
        if IS_BLOCKED:
            own = tl.load(scale + columns // SCALE_ROWS * num_blocks + block, mask=is_column, other=0.0)
            theirs = tl.load(x_scale + rows * num_blocks + block, mask=is_row, other=0.0)
            product = tl.dot(weights, tl.trans(part), input_precision="ieee")
            total += product * own[:, None] * theirs[None, :]
        else:
            total = tl.dot(weights, tl.trans(part), total, input_precision="ieee")
    is_real = is_column[:, None] & is_row[None, :]
    places = columns[:, None] * BLOCK_M + rows[None, :]
    total, is_last = sum_shares(total, places, is_real, partial, outputs * BLOCK_M, arrived + tile, share, SHARES)
    if is_last:
        if HAS_SCALES and not IS_BLOCKED:
            own = tl.load(scale + columns, mask=is_column, other=0.0)
            total = total * own[:, None] * tl.load(x_scale + rows, mask=is_row, other=0.0)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
        place = rows.to(tl.int64)[None, :] * outputs + columns[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=is_real)
