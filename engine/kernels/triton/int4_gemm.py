"""Multiplies x with a 4-bit matrix, widened inside the product, for few rows, where reading it dominates.

    a program: BLOCK_M rows of x, BLOCK_N outputs, a share of the groups

    packed [N, K / 2]   bytes j of group g:  low bits = input g * G + j,  high bits = input g * G + G / 2 + j
    a tile of bytes is thus two tiles of weights of one group, whose scale is applied to their products:
        sum += (x[:, low] @ (low - z)^T + x[:, high] @ (high - z)^T) * s

The shares of the groups are summed in a fixed order (`engine.kernels.triton.split_k`), so results depend neither
on the order of programs nor on the number of rows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import launch
from engine.kernels.triton.split_k import counters, num_shares, sum_shares
from engine.kernels.triton.tile import start

BLOCK_N = 64
"""Outputs per program."""
MAX_BLOCK_J = 64
"""Maximum number of bytes of an output that are widened together."""
ROW_BLOCKS = (16, 32, 64)
"""Possible rows per program: the smallest that holds all rows, else the largest."""


def int4_linear(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int
) -> torch.Tensor:
    """Multiply [M, K] with the matrix of an `Int4Linear` to [M, N], of x's type; summed in float32.

    packed: uint8 [N, K / 2]; scales: float32 [K / group_size, N]; zeros: uint8 like scales
    group_size: a multiple of 32 that divides K. x may have any strides.
    """
    (num_rows, inputs), outputs = x.shape, len(packed)
    groups = inputs // group_size
    block_m = next((rows for rows in ROW_BLOCKS if rows >= num_rows), ROW_BLOCKS[-1])
    tiles = -(-outputs // BLOCK_N)
    groups_each = -(-groups // num_shares(tiles, groups))
    shares = -(-groups // groups_each)
    out = torch.empty(num_rows, outputs, dtype=x.dtype, device=x.device)
    partial = out
    if shares > 1:
        partial = torch.empty(shares, num_rows, outputs, dtype=torch.float32, device=x.device)
    launch(
        _int4_gemm,
        (-(-num_rows // block_m), tiles, shares),
        x,
        packed,
        scales,
        zeros,
        out,
        partial,
        counters(x.device),
        num_rows,
        outputs,
        groups,
        groups_each,
        *x.stride(),
        packed.stride(0),
        scales.stride(0),
        GROUP=group_size,
        SHARES=shares,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_J=math.gcd(group_size // 2, MAX_BLOCK_J),
        INTERPRETED=not isinstance(_int4_gemm, triton.JITFunction),
        num_warps=4,
        num_stages=3,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _int4_gemm(
    x,
    packed,
    scales,
    zeros,
    out,
    partial,
    arrived,
    num_rows,
    outputs,
    groups,
    groups_each,
    x_row,
    x_column,
    packed_row,
    scales_row,
    GROUP: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    # Triton's interpreter multiplies bfloat16 wrongly, so it uses float32.
    dot_type: tl.constexpr = tl.float32 if INTERPRETED else x.dtype.element_ty
    share = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < outputs
    bytes_ = tl.arange(0, BLOCK_J)
    x_rows = x + rows.to(tl.int64)[:, None] * x_row
    packed_rows = packed + columns.to(tl.int64)[None, :] * packed_row
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(share * groups_each, tl.minimum(groups, (share + 1) * groups_each)):
        scale = tl.load(scales + group * scales_row + columns, is_column, 0.0)
        zero = tl.load(zeros + group * scales_row + columns, is_column, 0).to(tl.int32)
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, GROUP // 2, BLOCK_J):
            inputs = group * GROUP + first + bytes_
            both = tl.load(
                packed_rows + (group * (GROUP // 2) + first + bytes_)[:, None], is_column[None, :], 0
            ).to(tl.int32)
            low = tl.load(x_rows + inputs[None, :] * x_column, is_row[:, None], 0.0)
            high = tl.load(x_rows + (inputs + GROUP // 2)[None, :] * x_column, is_row[:, None], 0.0)
            low_weights = ((both & 15) - zero[None, :]).to(dot_type)
            high_weights = ((both >> 4) - zero[None, :]).to(dot_type)
            product = tl.dot(low.to(dot_type), low_weights, product, input_precision="ieee")
            product = tl.dot(high.to(dot_type), high_weights, product, input_precision="ieee")
        total += product * scale[None, :]
    is_real = is_row[:, None] & is_column[None, :]
    places = rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    arrived += tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    size = num_rows.to(tl.int64) * outputs
    total, is_last = sum_shares(total, places, is_real, partial, size, arrived, share, SHARES)
    if is_last:
        tl.store(out + places, total.to(out.dtype.element_ty), mask=is_real)
