"""A block of queries meets a tile of KV: what attention to decodes and to prompts has in common.

Softmax is computed online (Milakov and Gimelshein 2018, arXiv:1805.02867), in base 2 and float32. Rows of a block:

    queries that share a KV head    [ q0 h0 | q0 h1 | q1 h0 | q1 h1 | ... ]       "packed": group 2
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = tl.constexpr(64)
"""Positions of KV read at once. A page may be smaller, or larger."""
LOWEST = tl.constexpr(-1e30)
"""Where running maxima begin: finite, so that a row that has seen nothing yet subtracts no infinities."""
LOG2_E = 1.4426950408889634


def is_interpreted(kernel: object) -> bool:
    """Whether Triton was told to run a kernel in Python, as on machines without a GPU (TRITON_INTERPRET=1).

    Its `tl.dot` is wrong for bfloat16: kernels that are told convert to float32 before.
    """
    return not isinstance(kernel, triton.JITFunction)


@triton.jit
def attend(
    acc,  # float32 [M, BLOCK_D]: sum of weighted values, relative to `highest`
    highest,  # float32 [M]: largest score so far
    total,  # float32 [M]: sum of weights, relative to it
    query,  # [M, BLOCK_D]
    positions,  # int32 [TILE]
    exists,  # bool [TILE]: what is not is not read
    seen,  # bool [M, TILE] or [1, TILE]; ignored unless MASKED
    table,  # the row's page ids
    keys,  # first of the KV head
    values,
    page_stride,
    token_stride,
    scale,  # of scores, times log2(e)
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One tile's step: `acc`, `highest` and `total` with it."""
    dims = tl.arange(0, BLOCK_D)
    pages = tl.load(table + positions // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
    offsets = pages * page_stride + (positions % PAGE_SIZE) * token_stride
    offsets = offsets[:, None] + dims[None, :]
    held = exists[:, None] & (dims < HEAD_DIM)[None, :]
    dot_type: tl.constexpr = tl.float32 if INTERPRETED else query.dtype
    key = tl.load(keys + offsets, mask=held, other=0.0).to(query.dtype).to(dot_type)
    value = tl.load(values + offsets, mask=held, other=0.0).to(query.dtype).to(dot_type)
    scores = tl.dot(query.to(dot_type), tl.trans(key), input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    risen = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - risen[:, None])
    shrink = tl.exp2(highest - risen)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(dot_type), value, acc * shrink[:, None], input_precision="ieee")
    return acc, risen, total
