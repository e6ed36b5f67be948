"""Norms and rotates queries and keys and stores keys and values, in one pass over the fused projection's rows.

    heads of a token   [ q q q q q q q q | k k | v v ]       a program has some neighbouring heads, of any kind
                         norm, rotate     norm,  │
                         in place         rotate │
                                            └────┴──▶ pages, at the token's slot = page * page_size + offset

Head i's numbers are the pairs (j, j + head_dim / 2), as in transformers' `rotate_half`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import launch
from engine.kernels.triton.launch_config import power_of_2
from engine.kernels.triton.tile import start

_HEADS = 8
"""Heads per program."""
_LARGEST_FP8 = 448.0
"""Largest float8_e4m3fn number, to which larger ones are clamped, because the type has no infinity."""


@triton.jit(do_not_specialize=["tokens"])
def _rotations(
    positions_ptr,
    inv_freq_ptr,
    factor_ptr,
    out_ptr,
    tokens,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    token, rope = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    is_in = at < HALF
    inv_freq = tl.load(inv_freq_ptr + rope * HALF + at, mask=is_in, other=0.0)
    factor = tl.load(factor_ptr + rope * HALF + at, mask=is_in, other=0.0)
    angle = tl.load(positions_ptr + token).to(tl.float32) * inv_freq
    out = out_ptr + (rope * tokens + token) * 2 * HALF + at
    tl.store(out, (tl.cos(angle) * factor).to(out_ptr.dtype.element_ty), mask=is_in)
    tl.store(out + HALF, (tl.sin(angle) * factor).to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def _rotate_into(
    heads_ptr,  # [tokens, heads, 2 * HALF]: queries are overwritten
    pages_ptr,  # [2, pages, page_size, kv_heads, 2 * HALF]
    rotation_ptr,  # [tokens, 2, HALF]
    slots_ptr,  # [tokens]; a negative slot stores nothing
    norm_ptr,  # [queries + kv_heads, 2 * HALF]
    token_stride,
    head_stride,
    stride,
    kind_stride,
    page_stride,
    slot_stride,
    kv_head_stride,
    kv_stride,
    num_queries,
    num_kv_heads,
    page_size,
    eps,
    key_scale,
    value_scale,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,  # HALF as a power of two
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    LARGEST: tl.constexpr,  # largest number of pages; 0: no clamping
    PDL: tl.constexpr,
):
    start(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, BLOCK)[None, :]
    is_turned = (head < num_queries + num_kv_heads)[:, None]
    is_in = (head < num_queries + 2 * num_kv_heads)[:, None] & (at < HALF)
    source = heads_ptr + token * token_stride + head[:, None] * head_stride + at * stride
    first = tl.load(source, mask=is_in, other=0.0).to(tl.float32)
    second = tl.load(source + HALF * stride, mask=is_in, other=0.0).to(tl.float32)

    if HAS_NORM:
        squares = tl.sum(first * first + second * second, axis=1)[:, None]
        factor = tl.rsqrt(squares / (2 * HALF) + eps)
        weights = norm_ptr + head[:, None] * 2 * HALF + at
        first *= tl.where(is_turned, factor * tl.load(weights, mask=is_in & is_turned, other=0.0), 1.0)
        second *= tl.where(is_turned, factor * tl.load(weights + HALF, mask=is_in & is_turned, other=0.0), 1.0)
    angles = rotation_ptr + token * 2 * HALF + at
    cos = tl.where(is_turned, tl.load(angles, mask=at < HALF, other=0.0).to(tl.float32), 1.0)
    sin = tl.where(is_turned, tl.load(angles + HALF, mask=at < HALF, other=0.0).to(tl.float32), 0.0)
    left, right = first * cos - second * sin, second * cos + first * sin

    is_query = is_in & (head < num_queries)[:, None]
    tl.store(source, left.to(heads_ptr.dtype.element_ty), mask=is_query)
    tl.store(source + HALF * stride, right.to(heads_ptr.dtype.element_ty), mask=is_query)

    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        is_stored = is_in & (head >= num_queries)[:, None]
        kv_head = head - num_queries
        scale = tl.where(is_turned, key_scale, value_scale)
        left, right = left / scale, right / scale
        if LARGEST > 0:
            left = tl.clamp(left, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
            right = tl.clamp(right, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        place = (slot // page_size) * page_stride + (slot % page_size) * slot_stride
        kind = tl.where(is_turned, 0, kind_stride)
        target = pages_ptr + place + kind + (kv_head % num_kv_heads)[:, None] * kv_head_stride + at * kv_stride
        tl.store(target, left.to(pages_ptr.dtype.element_ty), mask=is_stored)
        tl.store(target + HALF * kv_stride, right.to(pages_ptr.dtype.element_ty), mask=is_stored)


def rotations(
    positions: torch.Tensor, inv_freq: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return cosines and sines, times `factor`, of int64 [N] positions: [rotations, N, 2, head_dim / 2].

    inv_freq, factor: float32 [rotations, head_dim / 2]
    """
    (count, half), tokens = inv_freq.shape, len(positions)
    out = torch.empty((count, tokens, 2, half), dtype=dtype, device=positions.device)
    if tokens:
        sizes = {"HALF": half, "BLOCK": power_of_2(half), "num_warps": 1}
        launch(_rotations, (tokens, count), positions, inv_freq, factor, out, tokens, **sizes)
    return out


def rotate_into(
    pages: torch.Tensor,
    slots: torch.Tensor,
    heads: torch.Tensor,
    rotation: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """Rotate queries and keys, normed first if `norm` is given; write keys and values into one layer's pages.

    pages: [2, num_pages, page_size, num_kv_heads, head_dim], of heads' type or another float, of any strides
    slots: int64 [N]; a token with a negative slot stores nothing
    heads: [N, num_heads + 2 * num_kv_heads, head_dim], of any strides; queries are overwritten
    rotation: [N, 2, head_dim / 2], contiguous, one of `rotations`; norm: [num_heads + num_kv_heads, head_dim]
    kv_scales: divisors of keys and of values before they are stored
    Returns the queries, a view of heads.
    """
    tokens, total, head_dim = heads.shape
    num_kv_heads = pages.shape[3]
    num_queries = total - 2 * num_kv_heads
    half = head_dim // 2
    if tokens:
        launch(
            _rotate_into,
            (tokens, -(-total // _HEADS)),
            heads,
            pages,
            rotation,
            slots,
            norm,
            *heads.stride(),
            *pages.stride(),
            num_queries,
            num_kv_heads,
            pages.shape[2],
            eps,
            *kv_scales,
            HALF=half,
            BLOCK=power_of_2(half),
            HEADS=_HEADS,
            HAS_NORM=norm is not None,
            LARGEST=_LARGEST_FP8 if pages.dtype == torch.float8_e4m3fn else 0.0,
        )
    return heads[:, :num_queries]
