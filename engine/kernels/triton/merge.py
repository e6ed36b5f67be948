"""Merges attention to two parts of a row's keys by sums of weights (Milakov et al. 2018, arXiv:1805.02867).

    out = (out_1 e^(s_1 - m) + out_2 e^(s_2 - m)) / (e^(s_1 - m) + e^(s_2 - m)),   m = max(s_1, s_2)

The s are logarithms of sums, so that one launch replaces eight passes over float32 copies of both parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import launch
from engine.kernels.triton.launch_config import power_of_2
from engine.kernels.triton.tile import start

_TOKENS = 16
"""Tokens per program, of one head."""


@triton.jit(do_not_specialize=["tokens"])
def _merge(
    first_ptr,  # [heads, tokens, size], any strides except the last
    first_sums_ptr,  # [heads, tokens]
    second_ptr,
    second_sums_ptr,
    out_ptr,  # [tokens, heads * size]
    first_head,
    first_token,
    first_sums_head,
    second_head,
    second_token,
    second_sums_head,
    out_token,
    tokens,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    token, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1).to(tl.int64)
    at, is_token = tl.arange(0, BLOCK), token < tokens
    is_in, token = is_token[:, None] & (at < SIZE)[None, :], token.to(tl.int64)
    first_sum = tl.load(first_sums_ptr + head * first_sums_head + token, mask=is_token, other=0.0)
    second_sum = tl.load(second_sums_ptr + head * second_sums_head + token, mask=is_token, other=0.0)
    highest = tl.maximum(first_sum, second_sum)
    first_weight, second_weight = tl.exp(first_sum - highest), tl.exp(second_sum - highest)
    total = first_weight + second_weight
    first_at = first_ptr + head * first_head + token[:, None] * first_token + at[None, :]
    second_at = second_ptr + head * second_head + token[:, None] * second_token + at[None, :]
    first = tl.load(first_at, mask=is_in, other=0.0).to(tl.float32) * (first_weight / total)[:, None]
    second = tl.load(second_at, mask=is_in, other=0.0).to(tl.float32) * (second_weight / total)[:, None]
    out = out_ptr + token[:, None] * out_token + head * SIZE + at[None, :]
    tl.store(out, (first + second).to(out_ptr.dtype.element_ty), mask=is_in)


def merge(
    first: torch.Tensor,
    first_sums: torch.Tensor,
    second: torch.Tensor,
    second_sums: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the merged results to `out`, [N, H * D].

    first, second: [H, N, D]; first_sums, second_sums: float32 [H, N]. In all of them the last stride is 1.
    """
    heads, tokens, size = first.shape
    strides = first.stride()[:2], first_sums.stride()[:1], second.stride()[:2], second_sums.stride()[:1]
    launch(
        _merge,
        (-(-tokens // _TOKENS), heads),
        first,
        first_sums,
        second,
        second_sums,
        out,
        *(stride for each in strides for stride in each),
        out.stride(0),
        tokens,
        SIZE=size,
        BLOCK=power_of_2(size),
        TOKENS=_TOKENS,
        num_warps=4,
    )
