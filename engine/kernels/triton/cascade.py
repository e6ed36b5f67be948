"""Attention of groups of rows to their shared prefixes (cascade attention): KV is read once for all queries.

    row 0   [ shared tiles          | own ]         a program: a piece of the shared tiles, for one KV head,
    row 2   [ the same              | own tiles ]   and all queries of a part of the group
    row 3   [ the same              | ow ]

Each row of the group gets a partial result, which `engine.kernels.triton.decode` merges with those of its own
tiles. Within rounding, a row's result thus depends on its group; `cascade_attention: off` makes it independent.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.decode import Parts, store_part
from engine.kernels.triton.kv_heads import KVHeads
from engine.kernels.triton.launch import launch
from engine.kernels.triton.launch_config import LaunchConfig, block_of, decode_threads, largest_config
from engine.kernels.triton.tile import LOG2_E, LOWEST, TILE, attend, is_interpreted, load_queries, start
from engine.kernels.triton.work_list import WorkList

_QUERIES = 64
"""Queries of a program: the rows of Hopper GPUs' asynchronous products."""


def cascade_config(heads: KVHeads, element_size: int, device: torch.device) -> tuple[LaunchConfig, int] | None:
    """Return the launch configuration for such heads, and the number of rows of a program; None if it cannot have
    two.
    """
    program = largest_config(min(_QUERIES, heads.most_rows), 16, heads, element_size, device)
    if program is None or program.rows < 2 * heads.group:
        return None
    return program, program.rows // heads.group


def attend_shared(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    work: WorkList,
    parts: Parts,
    heads: KVHeads,
    *,
    program: LaunchConfig,
    scale: float,
    kv_scales: tuple[float, float],
    soft_cap: float | None = None,
) -> None:
    """Compute the partial results of the shared prefixes of the groups in `work`; `program` is from
    `cascade_config`.

    The other arguments are those of `engine.kernels.triton.decode.decode`, which has to follow.
    """
    groups = work.groups
    assert groups is not None
    launch(
        _attend_shared,
        (work.num_shared_programs,),
        query,
        pages[0],
        pages[-1],
        block_table,
        work.shared_items,
        work.row_parts,
        work.sizes,
        groups.tiles,
        groups.members,
        parts.values,
        parts.lse,
        scale * kv_scales[0] * LOG2_E,
        *query.stride()[:2],
        *heads.kv_strides(pages),
        block_table.stride(0),
        NUM_KV_HEADS=heads.count,
        GROUP=heads.group,
        MOST_MEMBERS=groups.most_members,
        BLOCK_M=program.rows,
        PAGE_SIZE=pages.shape[2],
        HEAD_DIM=heads.head_dim,
        BLOCK_D=block_of(heads.head_dim),
        REST=heads.rest,
        BLOCK_R=block_of(heads.rest),
        SOFT_CAP=soft_cap or 0.0,
        INTERPRETED=is_interpreted(_attend_shared),
        num_warps=decode_threads(heads) // 32,
        num_stages=program.num_stages,
    )


@triton.jit(do_not_specialize=["table_stride"])
def _attend_shared(
    query,
    keys,
    values,
    block_table,
    items,
    row_parts,
    sizes,
    shared_tiles,
    members,
    part_values,
    part_lse,
    scale,
    query_stride,
    query_head_stride,
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MOST_MEMBERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    num_items = tl.load(sizes + 2)
    chunk = tl.load(sizes + 3)
    dims = tl.arange(0, BLOCK_D)
    at = tl.arange(0, BLOCK_M)
    member, head = at // GROUP, at % GROUP
    is_dim = (dims < HEAD_DIM)[None, :]
    for turn in range(tl.program_id(0), num_items * NUM_KV_HEADS, tl.num_programs(0)):
        item = turn // NUM_KV_HEADS
        kv_head = turn % NUM_KV_HEADS
        leader = tl.load(items + 2 * item).to(tl.int64)
        begin = tl.load(items + 2 * item + 1)
        end = tl.minimum(begin + chunk, tl.load(shared_tiles + leader))
        row = tl.load(members + leader * MOST_MEMBERS + member, mask=member < MOST_MEMBERS, other=-1).to(tl.int64)
        is_real = (row >= 0)[:, None] & is_dim
        heads = kv_head * GROUP + head
        begins = row * query_stride + heads * query_head_stride
        block, rest = load_queries(query, begins, row >= 0, HEAD_DIM, BLOCK_D, REST, BLOCK_R)
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        highest = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        for tile in range(begin, end):
            positions = tile * TILE + tl.arange(0, TILE)
            exists = positions >= 0
            acc, highest, total = attend(
                acc,
                highest,
                total,
                block,
                rest,
                positions,
                exists,
                exists[None, :],
                block_table + leader * table_stride,
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
                False,
                INTERPRETED,
            )
        part = tl.load(row_parts + row, mask=row >= 0, other=0) + begin // chunk
        store_part(
            acc, highest, total, part, heads, is_real, part_values, part_lse, NUM_KV_HEADS * GROUP, HEAD_DIM
        )
