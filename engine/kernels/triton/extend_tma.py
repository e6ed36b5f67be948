"""`extend` for tiles of KV that are one box of memory, which Hopper and later GPUs copy by TMA.

    page    [ 64 or 128 positions x heads x head_dim ]      a tile is within a page, and is one head's columns

Threads then hold no addresses of keys and values, which makes room for tiles of 128 positions in registers.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import launch
from engine.kernels.triton.launch_config import block_of, shared_memory
from engine.kernels.triton.tile import LOG2_E, LOWEST, is_interpreted, seen_tiles, weighed

_OLDEST = (9, 0)
TMA_ROWS = 128
"""Rows of a program."""
_WARPS = 8
_TILES = (128, 2), (64, 3)
"""Positions of a tile, and tiles in flight; the first that fits is used."""
_BESIDE = 8 * 1024
_LARGEST_HEAD = 256
"""Most bytes of a head with which accumulators stay in registers."""


def tma_tile(
    page_size: int, head_dim: int, element_size: int, device: torch.device, *, is_unusual: bool
) -> tuple[int, int] | None:
    """Return the positions of a tile and the number of stages for such pages; None if `extend` has to be used.

    `is_unusual`: whether scores have soft caps or sinks.
    """
    if is_unusual or block_of(head_dim) != head_dim or find_spec("triton.tools.tensor_descriptor") is None:
        return None
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _OLDEST:
        return None
    return fitting_tile(page_size, head_dim, element_size, shared_memory(device))


def fitting_tile(page_size: int, head_dim: int, element_size: int, limit: int) -> tuple[int, int] | None:
    """Return the first tile that divides a page and fits into `limit` bytes."""
    if head_dim * element_size > _LARGEST_HEAD:
        return None
    for tile, stages in _TILES:
        shared = (TMA_ROWS + 2 * stages * tile) * head_dim * element_size + _BESIDE
        if page_size % tile == 0 and shared <= limit:
            return tile, stages
    return None


def extend_tma(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_lens: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    tile: tuple[int, int],
    scale: float,
    window: int | None,
    kv_scales: tuple[float, float],
) -> None:
    """Compute as `extend` does. `tile`: from `tma_tile`; `tiles`: 128 // group queries each. Contiguous pages."""
    num_heads, head_dim = query.shape[1:]
    page_size, num_kv_heads = pages.shape[2:4]
    size, stages = tile
    launch(
        _extend_tma,
        (num_kv_heads, len(tiles)),
        query,
        _boxes(pages[0], size),
        _boxes(pages[1], size),
        block_table,
        qo_indptr,
        kv_lens,
        tiles,
        out,
        scale * kv_scales[0] * LOG2_E,
        kv_scales[1],
        *query.stride()[:2],
        block_table.stride(0),
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        BLOCK_M=TMA_ROWS,
        TILE=size,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        WINDOW=window or 0,
        INTERPRETED=is_interpreted(_extend_tma),
        num_warps=_WARPS,
        num_stages=stages,
    )


def _boxes(pages: torch.Tensor, tile: int) -> Any:
    """Describe keys or values, [pages, page_size, num_kv_heads, head_dim], as boxes of `tile` positions."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    head_dim = pages.shape[3]
    return TensorDescriptor.from_tensor(pages.view(-1, pages.shape[2] * head_dim), [tile, head_dim])


@triton.jit
def _attend_box(
    acc,
    highest,
    total,
    query,  # [M, HEAD_DIM]
    keys,
    values,
    row,  # first position of the box
    column,
    exists,  # bool [TILE]: old numbers at other positions may be NaN
    seen,  # bool [M, TILE]; ignored unless MASKED
    scale,
    MASKED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return `acc`, `highest` and `total` after one more tile (`engine.kernels.triton.tile.attend`)."""
    dot_type: tl.constexpr = tl.float32 if INTERPRETED else query.dtype
    key = keys.load([row, column]).to(query.dtype).to(dot_type)
    scores = tl.dot(query.to(dot_type), tl.trans(key), input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    weights, shrink, risen, total = weighed(scores, highest, total)
    value = values.load([row, column]).to(query.dtype).to(dot_type)
    if MASKED:
        value = tl.where(exists[:, None], value, 0.0)
    acc = tl.dot(weights.to(dot_type), value, acc * shrink[:, None], input_precision="ieee")
    return acc, risen, total


@triton.jit(do_not_specialize=["table_stride"])
def _extend_tma(
    query,
    keys,
    values,
    block_table,
    qo_indptr,
    kv_lens,
    tiles,
    out,
    scale,
    value_scale,
    query_stride,
    query_head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    kv_head = tl.program_id(0)
    at = tiles + 2 * tl.program_id(1)
    row = tl.load(at)
    first = tl.load(at + 1)
    begin = tl.load(qo_indptr + row)
    num_queries = tl.load(qo_indptr + row + 1) - begin
    offset = tl.load(kv_lens + row) - num_queries  # position of the row's first query
    last = tl.minimum(first + BLOCK_M // GROUP, num_queries)

    packed = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    index = first + packed // GROUP
    is_real = ((packed < BLOCK_M // GROUP * GROUP) & (index < num_queries))[:, None]
    token = (begin + index).to(tl.int64)
    head = kv_head * GROUP + packed % GROUP
    places = (token * query_stride + head * query_head_stride)[:, None] + dims[None, :]
    block = tl.load(query + places, mask=is_real, other=0.0)

    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    highest = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    start, whole_start, whole_end, end = seen_tiles(offset, first, last, WINDOW, TILE)
    table = block_table + row.to(tl.int64) * table_stride
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
                if WINDOW > 0:
                    seen = seen & (distance < WINDOW)
                page = tl.load(table + kv_tile * TILE // PAGE_SIZE)
                acc, highest, total = _attend_box(
                    acc,
                    highest,
                    total,
                    block,
                    keys,
                    values,
                    page * PAGE_SIZE + kv_tile * TILE % PAGE_SIZE,
                    kv_head * HEAD_DIM,
                    (positions >= start) & (positions < end),
                    seen,
                    scale,
                    phase != 1,
                    INTERPRETED,
                )
    acc = acc / tl.where(total > 0, total, 1.0)[:, None] * value_scale  # Padding has no visible position.
    places = (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=is_real)
