"""Attention of rows with any number of queries over paged KV: prefix and new tokens in one pass.

A tile is a run of one row's queries, with heads that share a KV head packed together; KV is read in tiles of 64:

    queries of the tile, from position p to q        window w: no query sees positions before p - w + 1

    KV   ....|  edge  |  whole  |  whole  |  edge  |  edge |
             p-w+1    q-w+1               p        q          edge: masked, some queries see only a part
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from engine.kernels.triton.kv_heads import KVHeads
from engine.kernels.triton.launch import launch
from engine.kernels.triton.launch_config import LaunchConfig, block_of, largest_config, power_of_2
from engine.kernels.triton.tile import (
    LOG2_E,
    LOWEST,
    TILE,
    attend,
    is_interpreted,
    load_queries,
    scores_of_sinks,
    seen_tiles,
    store_sums,
)

_WIDE_BYTES = 256
"""Largest bytes of a head for which accumulators of 128 rows stay in registers."""
_SHORT_ROWS = 32
"""Rows of a program when no row of the batch fills more than two of them."""


def extend_config(heads: KVHeads, element_size: int, longest: int, device: torch.device) -> LaunchConfig | None:
    """Return the launch configuration for such heads and at most `longest` queries per row: one of two, for rows
    of a few tokens, or for as many rows as registers and shared memory hold. None if none fits. Because there are
    only two, both can be compiled before the first step.
    """
    most = min(128 if block_of(heads.head_dim) * element_size <= _WIDE_BYTES else 64, heads.most_rows)
    least = max(16, power_of_2(heads.group))
    short = max(least, _SHORT_ROWS)
    rows = max(least, most) if heads.group * longest > 2 * short else short
    return largest_config(rows, least, heads, element_size, device)


def num_warps(program: LaunchConfig, head_dim: int) -> int:
    """Return the warps of a program: eight if four cannot hold its accumulators in registers."""
    return 8 if program.rows > 64 or head_dim > 128 else 4


def query_tiles(
    query_lens: Sequence[int], kv_lens: Sequence[int], first_row: int, block: int
) -> npt.NDArray[np.int32]:
    """Return row and first query of each tile of `block` queries, [T, 2], for the rows from `first_row` on.

    Tiles with the most KV come first, so that the last ones to finish are short.
    """
    lens = np.array(query_lens[first_row:])
    counts = -(-lens // block)
    rows = np.repeat(np.arange(len(lens)), counts)
    firsts = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * block
    begins = np.array(kv_lens[first_row:]) - lens
    order = np.argsort(-(begins[rows] + firsts), kind="stable")
    return np.stack((rows + first_row, firsts), axis=1)[order].astype(np.int32)


def extend(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_lens: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    heads: KVHeads,
    *,
    program: LaunchConfig,
    scale: float,
    window: int | None,
    kv_scales: tuple[float, float],
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """Attend from each query of the rows in `tiles` to its row's positions up to its own, or to all of them.

    query: [N, num_heads, head_dim], numbers of a head contiguous; row r's are qo_indptr[r] .. qo_indptr[r + 1],
        the last of its kv_lens[r] positions if `is_causal`
    pages: [2 (1 of latent KV), pages, page_size, num_kv_heads, head_dim], numbers of a head contiguous; otherwise
        any strides
    block_table: int32 [R, P], pages of a row contiguous; qo_indptr: int32 [R + 1]; kv_lens: int32 [R]
    tiles: int32 [T, 2], from `query_tiles`, of `program.rows // group` queries; program: from `extend_config`
    out: [N, num_heads * value_dim], contiguous; only these rows' tokens are written
    scale: factor of scores; kv_scales: factors of the keys and values in the pages
    soft_cap: scores become cap * tanh(score / cap); sinks: [num_heads], a score of each head without a value
    sums: float32 [N, num_heads], contiguous: gets the logarithms of the sums of weights; -inf without positions
    """
    launch(
        _extend,
        (heads.count, len(tiles)),
        query,
        pages[0],
        pages[-1],
        block_table,
        qo_indptr,
        kv_lens,
        tiles,
        out,
        query if sinks is None else sinks,
        query if sums is None else sums,
        scale * kv_scales[0] * LOG2_E,
        kv_scales[0 if heads.rest else 1],
        *query.stride()[:2],
        *heads.kv_strides(pages),
        block_table.stride(0),
        NUM_HEADS=heads.num_heads,
        GROUP=heads.group,
        BLOCK_M=program.rows,
        PAGE_SIZE=pages.shape[2],
        HEAD_DIM=heads.head_dim,
        BLOCK_D=block_of(heads.head_dim),
        REST=heads.rest,
        BLOCK_R=block_of(heads.rest),
        WINDOW=window or 0,
        SOFT_CAP=soft_cap or 0.0,
        HAS_SINKS=sinks is not None,
        HAS_SUMS=sums is not None,
        IS_CAUSAL=is_causal,
        INTERPRETED=is_interpreted(_extend),
        num_warps=num_warps(program, heads.head_dim),
        num_stages=program.num_stages,
    )


@triton.jit(do_not_specialize=["table_stride"])
def _extend(
    query,
    keys,
    values,
    block_table,
    qo_indptr,
    kv_lens,
    tiles,
    out,
    sinks,
    sums,
    scale,
    value_scale,
    query_stride,
    query_head_stride,
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile = tiles + 2 * tl.program_id(1)
    row = tl.load(tile)
    first = tl.load(tile + 1)
    begin = tl.load(qo_indptr + row)
    num_queries = tl.load(qo_indptr + row + 1) - begin
    kv_len = tl.load(kv_lens + row)
    offset = kv_len - num_queries if IS_CAUSAL else kv_len  # position of the row's first query
    last = tl.minimum(first + BLOCK_M // GROUP, num_queries)

    packed = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    index = first + packed // GROUP
    is_query = (packed < BLOCK_M // GROUP * GROUP) & (index < num_queries)
    is_real = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    token = (begin + index).to(tl.int64)
    head = kv_head * GROUP + packed % GROUP
    begins = token * query_stride + head * query_head_stride
    block, rest = load_queries(query, begins, is_query, HEAD_DIM, BLOCK_D, REST, BLOCK_R)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    highest = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SINKS:  # Sinks count as a score before all others.
        highest = scores_of_sinks(sinks, head, packed < BLOCK_M // GROUP * GROUP)
        total = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    start, whole_start, whole_end, end = seen_tiles(offset, first, last, WINDOW, TILE)
    if not IS_CAUSAL:  # Queries come after all positions.
        end = kv_len
        whole_end = kv_len // TILE
    for phase in tl.static_range(3):
        if phase == 0:
            tile_begin, tile_end = start // TILE, whole_start
        elif phase == 1:
            tile_begin, tile_end = whole_start, whole_end
        else:
            tile_begin, tile_end = whole_end, tl.cdiv(end, TILE)
        if phase != 0 or WINDOW > 0:
            for kv_tile in range(tile_begin, tile_end):
                positions = kv_tile * TILE + tl.arange(0, TILE)
                distance = (offset + index)[:, None] - positions[None, :]
                seen = distance >= 0
                if not IS_CAUSAL:
                    seen = seen & (positions < end)[None, :]
                if WINDOW > 0:
                    seen = seen & (distance < WINDOW)
                acc, highest, total = attend(
                    acc,
                    highest,
                    total,
                    block,
                    rest,
                    positions,
                    (positions >= start) & (positions < end),
                    seen,
                    block_table + row.to(tl.int64) * table_stride,
                    keys + kv_head * head_stride,
                    values + kv_head * head_stride,
                    page_stride,
                    token_stride,
                    scale,
                    PAGE_SIZE,
                    HEAD_DIM,
                    BLOCK_D,
                    REST,
                    SOFT_CAP,
                    phase != 1,
                    INTERPRETED,
                )
    if HAS_SUMS:
        store_sums(sums + token * NUM_HEADS + head, highest, total, is_query)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None] * value_scale  # Padding has no visible position.
    places = (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=is_real)
