"""Attention of rows with one query each over paged KV: flash decoding, which cuts long rows and merges the pieces.

Programs take (item, KV head) in turn: the query heads that share the KV head attend to the item's tiles. A row
with one partial result, as all rows of large batches have, is then finished. For other rows, the program that
computes a row's last item merges all partial results, always in the same order:

    softmax(all) @ V = sum of parts, weighted by exp2(lse of a part - largest)

The shared prefixes of groups of rows are computed before (`engine.kernels.triton.cascade`) and merged likewise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.kv_heads import KVHeads
from engine.kernels.triton.launch import launch
from engine.kernels.triton.launch_config import LaunchConfig, block_of, decode_threads, largest_config, power_of_2
from engine.kernels.triton.tile import (
    LOG2_E,
    LOWEST,
    TILE,
    attend,
    is_interpreted,
    load_queries,
    scores_of_sinks,
    start,
    store_sums,
)
from engine.kernels.triton.work_list import WorkList

_MIN_DOT_ROWS = 16
"""Minimum number of rows of `tl.dot`: smaller groups are padded."""


class Parts:
    """Buffers for a work list's partial results, shared by all layers."""

    def __init__(self, capacity: int, heads: KVHeads, device: torch.device) -> None:
        """`capacity`: maximum number of partial results."""
        shape = capacity, heads.num_heads
        self.values = torch.empty(*shape, heads.head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(shape, dtype=torch.float32, device=device)
        """Base-2 logarithm of the sum of the exponentials of an item's scores."""


def decode_config(heads: KVHeads, element_size: int, device: torch.device) -> LaunchConfig | None:
    """Return the launch configuration for such heads; None if none fits."""
    rows = max(_MIN_DOT_ROWS, power_of_2(heads.group))
    return largest_config(rows, rows, heads, element_size, device)


def decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    work: WorkList,
    parts: Parts,
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
) -> None:
    """Attend from the last position of each row to all of its KV.

    query: [R, num_heads, head_dim], numbers of a head contiguous
    pages: [2 (1 of latent KV), pages, page_size, num_kv_heads, head_dim], numbers of a head contiguous; otherwise
        any strides
    block_table: int32 [R, P], pages of a row contiguous; kv_lens: int32 [R], those for which `work` was built
    out: [R, num_heads * value_dim], contiguous; a row without positions gets zeros
    program: from `decode_config`
    scale: factor of scores; kv_scales: factors of the keys and values in the pages
    soft_cap: scores become cap * tanh(score / cap); sinks: [num_heads], a score of each head without a value
    sums: float32 [R, num_heads], contiguous: gets the logarithms of the sums of weights; -inf without positions
    """
    groups = work.groups
    launch(
        _attend,
        (work.num_programs,),
        query,
        pages[0],
        pages[-1],
        block_table,
        kv_lens,
        work.items,
        work.row_parts,
        work.sizes,
        work.arrived,
        kv_lens if groups is None else groups.tiles,
        parts.values,
        parts.lse,
        out,
        query if sinks is None else sinks,
        parts.lse if sums is None else sums,
        scale * kv_scales[0] * LOG2_E,
        kv_scales[0 if heads.rest else 1],
        *query.stride()[:2],
        *heads.kv_strides(pages),
        block_table.stride(0),
        NUM_KV_HEADS=heads.count,
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
        HAS_GROUPS=groups is not None,
        HAS_SUMS=sums is not None,
        INTERPRETED=is_interpreted(_attend),
        num_warps=decode_threads(heads) // 32,
        num_stages=program.num_stages,
    )


@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    query,
    keys,
    values,
    block_table,
    kv_lens,
    items,
    row_parts,
    sizes,
    arrived,
    shared_tiles,
    part_values,
    part_lse,
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
    NUM_KV_HEADS: tl.constexpr,
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
    HAS_GROUPS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    num_items = tl.load(sizes)
    chunk = tl.load(sizes + 1)
    member = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    is_real = (member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    for turn in range(tl.program_id(0), num_items * NUM_KV_HEADS, tl.num_programs(0)):
        item = turn // NUM_KV_HEADS
        kv_head = turn % NUM_KV_HEADS  # Varies fastest, because heads of a position are often adjacent.
        row = tl.load(items + 2 * item).to(tl.int64)
        begin = tl.load(items + 2 * item + 1)
        kv_len = tl.load(kv_lens + row)
        heads = kv_head * GROUP + member
        begins = row * query_stride + heads * query_head_stride
        block, rest = load_queries(query, begins, member < GROUP, HEAD_DIM, BLOCK_D, REST, BLOCK_R)
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        highest = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        for tile in range(begin, tl.minimum(begin + chunk, tl.cdiv(kv_len, TILE))):
            positions = tile * TILE + tl.arange(0, TILE)
            exists = positions < kv_len
            if WINDOW > 0:
                exists = exists & (positions >= kv_len - WINDOW)
            acc, highest, total = attend(
                acc,
                highest,
                total,
                block,
                rest,
                positions,
                exists,
                exists[None, :],
                block_table + row * table_stride,
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
                True,
                INTERPRETED,
            )
        first_part = tl.load(row_parts + row)
        num_parts = tl.load(row_parts + row + 1) - first_part
        is_whole = num_parts == 1
        if not is_whole:
            part = item
            num_own = num_parts
            if HAS_GROUPS:
                tiles = tl.load(shared_tiles + row)
                num_shared = tl.cdiv(tiles, tl.load(sizes + 3))
                part = first_part + num_shared + (begin - tiles) // chunk
                num_own = num_parts - num_shared
            store_part(
                acc, highest, total, part, heads, is_real, part_values, part_lse, NUM_KV_HEADS * GROUP, HEAD_DIM
            )
            tl.debug_barrier()  # All threads have written before one signals it.
            place = arrived + row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(place, 1, sem="acq_rel", scope="gpu") == num_own - 1:
                tl.debug_barrier()
                tl.store(place, 0)  # reset for the next layer
                acc, highest, total = _merged(
                    part_values,
                    part_lse,
                    first_part,
                    num_parts,
                    heads,
                    is_real,
                    NUM_KV_HEADS * GROUP,
                    HEAD_DIM,
                    BLOCK_M,
                    BLOCK_D,
                )
                is_whole = True
        if is_whole:
            if HAS_SINKS:
                sink = scores_of_sinks(sinks, heads, member < GROUP)
                risen = tl.maximum(highest, sink)
                shrink = tl.exp2(highest - risen)
                acc = acc * shrink[:, None]
                total = total * shrink + tl.exp2(sink - risen)
            if HAS_SUMS:
                store_sums(sums + row * NUM_KV_HEADS * GROUP + heads, highest, total, member < GROUP)
            whole = acc / tl.where(total > 0, total, 1.0)[:, None] * value_scale
            place = (row * NUM_KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(out + place, whole.to(out.dtype.element_ty), mask=is_real)


@triton.jit
def store_part(
    acc,
    highest,
    total,
    part,
    heads,
    is_real,
    part_values,
    part_lse,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Write partial results: part [1] or [M] is the number of each row's, and `heads` [M] its query head."""
    dims = tl.arange(0, acc.shape[1])
    place = tl.cast(part, tl.int64) * NUM_HEADS + heads
    value = acc / total[:, None]
    tl.store(part_values + place[:, None] * HEAD_DIM + dims[None, :], value, mask=is_real)
    is_row = tl.max(is_real.to(tl.int32), 1) > 0
    tl.store(part_lse + place, highest + tl.log2(total), mask=is_row)


@triton.jit
def _merged(
    part_values,
    part_lse,
    first_part,
    num_parts,
    heads,
    is_real,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return the sum of a row's partial results in their order, the largest logarithm, and the sum of weights."""
    dims = tl.arange(0, BLOCK_D)
    is_row = tl.max(is_real.to(tl.int32), 1) > 0
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    highest = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for part in range(first_part, first_part + num_parts):
        place = tl.cast(part, tl.int64) * NUM_HEADS + heads
        # Bypass the nearest cache, which may hold old numbers.
        lse = tl.load(part_lse + place, mask=is_row, other=0.0, cache_modifier=".cg")
        at = part_values + place[:, None] * HEAD_DIM + dims[None, :]
        value = tl.load(at, mask=is_real, other=0.0, cache_modifier=".cg")
        risen = tl.maximum(highest, lse)
        weight = tl.exp2(lse - risen)
        shrink = tl.exp2(highest - risen)
        acc = acc * shrink[:, None] + value * weight[:, None]
        total = total * shrink + weight
        highest = risen
    return acc, highest, total
