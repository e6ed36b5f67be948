"""Assigns tokens to experts, as tiles: a counting sort on the device, with one program per expert.

    chosen     2 0 | 0 3 | 2 0           experts of 3 tokens, 2 each: pairs 0 .. 5
    order      1 2 5 | 0 4 | 3           pairs by expert, and of one expert in their own order
    tiles      (0, 0, 2) (0, 2, 3) (2, 3, 5) (3, 5, 6) (-1, ...)        for tiles of 2: expert, first row, end

The number of tiles depends on the tokens. The largest possible number is made, so that the host need not wait;
unused ones at the end are marked with expert -1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import launch
from engine.kernels.triton.launch_config import power_of_2
from engine.kernels.triton.tile import start

_BLOCK = 1024  # Pairs examined together.


def expert_tiles(
    chosen: torch.Tensor, num_experts: int, first_expert: int, tile_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map int64 [N, k] experts to `order`, int32 [N * k], and `tiles`, int32 [T, 3], for the `num_experts` experts
    from `first_expert` on. Pairs of other experts are in no tile.
    """
    num_pairs = chosen.numel()
    # Every expert with tokens has at most one partly filled tile.
    num_tiles = min(num_pairs, num_pairs // tile_rows + num_experts)
    counts = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    order = torch.empty(num_pairs, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=chosen.device)
    grid = (num_experts,)
    chosen = chosen.contiguous()
    launch(_count, grid, chosen, counts, num_pairs, first_expert, BLOCK=_BLOCK)
    launch(
        _place,
        grid,
        chosen,
        counts,
        order,
        tiles,
        num_pairs,
        num_experts,
        first_expert,
        num_tiles,
        TILE=tile_rows,
        EXPERTS=power_of_2(num_experts),
        BLOCK=_BLOCK,
    )
    return order, tiles


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def _count(chosen, counts, num_pairs, first_expert, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Count the pairs of this program's expert."""
    start(PDL)
    expert = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        pair = begin + tl.arange(0, BLOCK)
        total += (tl.load(chosen + pair, pair < num_pairs, -1) == first_expert + expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total))


@triton.jit(do_not_specialize=["num_pairs", "first_expert", "num_tiles"])
def _place(
    chosen,
    counts,
    order,
    tiles,
    num_pairs,
    num_experts,
    first_expert,
    num_tiles,
    TILE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the part of `order` and `tiles` of this program's expert, after those of the experts before it."""
    start(PDL)
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    count = tl.load(counts + experts, experts < num_experts, 0)
    tiles_of = (count + TILE - 1) // TILE
    row = tl.sum(tl.where(experts < expert, count, 0))
    end = row + tl.sum(tl.where(experts == expert, count, 0))
    tile = tl.sum(tl.where(experts < expert, tiles_of, 0))
    last = tile + tl.sum(tl.where(experts == expert, tiles_of, 0))
    stop = tl.where(expert == num_experts - 1, num_tiles, last)  # The last expert marks the unused tiles.
    for begin in range(tile, stop, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        first = row + (at - tile) * TILE
        tl.store(tiles + at * 3, tl.where(at < last, expert, -1), at < stop)
        tl.store(tiles + at * 3 + 1, first, at < stop)
        tl.store(tiles + at * 3 + 2, tl.minimum(first + TILE, end), at < stop)
    for begin in range(0, num_pairs, BLOCK):
        pair = begin + tl.arange(0, BLOCK)
        is_mine = (tl.load(chosen + pair, pair < num_pairs, -1) == first_expert + expert).to(tl.int32)
        tl.store(order + row + tl.cumsum(is_mine, 0) - 1, pair, is_mine > 0)
        row += tl.sum(is_mine)
