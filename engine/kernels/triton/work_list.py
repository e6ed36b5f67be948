"""The work list of a decode step, which assigns pieces of rows' KV to programs: made once per step, on the device.

    tiles of KV   row 0 ########   row 1 ###   row 2 #####          chunk: 3 tiles
    items         0,0  0,3  0,6    1,0         2,0  2,3             (row, first tile)
    row_items     0                3           4           6

Each item is computed for every KV head. Programs take items in turn, so the time of a step is the number of turns
times the length of one. The chunk length minimizes it: many pieces for a few long rows, whole rows if there are
many. The host is not involved: sizes of launches and buffers depend only on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import launch
from engine.kernels.triton.tile import TILE

_CHUNKS = tl.constexpr(64)
"""Number of chunk lengths that are considered: four per octave, 1 to 57,344 tiles."""
_ROWS = tl.constexpr(32)
"""Rows examined together."""
_LISTED = tl.constexpr(128)
"""Rows whose items are written together: a constant, so that one kernel lists any number of rows."""
_ITEM_COST = tl.constexpr(1)
"""Cost of starting and merging an item, in tiles."""
_TURNS = 4
"""Maximum number of turns, beyond whole rows, that there is room for."""


class WorkList:
    """The items of up to `max_rows` rows. Its tensors keep their addresses: `build` fills them anew."""

    def __init__(self, max_rows: int, num_kv_heads: int, num_programs: int, device: torch.device) -> None:
        """The list is for launches of `num_programs` programs."""
        self.capacity = max_rows + _TURNS * -(-num_programs // num_kv_heads)
        """Maximum number of items."""
        self.num_programs = num_programs
        self._num_kv_heads = num_kv_heads
        self.items = torch.empty(self.capacity, 2, dtype=torch.int32, device=device)
        """int32: row and first tile."""
        self.row_items = torch.empty(max_rows + 1, dtype=torch.int32, device=device)
        """int32: row r's items are row_items[r] .. row_items[r + 1]."""
        self.sizes = torch.empty(2, dtype=torch.int32, device=device)
        """int32: number of items, tiles per chunk."""

    def build(self, kv_lens: torch.Tensor, window: int | None) -> None:
        """Make the items of rows with int32 [R] positions and one query at the last; empty rows get none."""
        launch(
            _build,
            (1,),
            kv_lens,
            len(kv_lens),
            self.items,
            self.row_items,
            self.sizes,
            self.capacity,
            self.num_programs,
            self._num_kv_heads,
            WINDOW=window or 0,
        )


@triton.jit
def first_tile(kv_len, WINDOW: tl.constexpr):
    """Return the tile of the first position that a query at position kv_len - 1 sees. WINDOW 0: position 0."""
    if WINDOW == 0:
        return kv_len * 0
    return tl.maximum(kv_len - WINDOW, 0) // TILE


@triton.jit
def _num_tiles(kv_lens, rows, num_rows, WINDOW: tl.constexpr):
    lengths = tl.load(kv_lens + rows, mask=rows < num_rows, other=0)
    return tl.cdiv(lengths, TILE) - first_tile(lengths, WINDOW)


@triton.jit
def _best_chunk(kv_lens, num_rows, capacity, num_programs, num_kv_heads, WINDOW: tl.constexpr):
    index = tl.arange(0, _CHUNKS)
    chunks = ((4 + index % 4) << (index // 4)) >> 2
    counts = tl.zeros([_CHUNKS], dtype=tl.int32)
    for first in range(0, num_rows, _ROWS):
        tiles = _num_tiles(kv_lens, first + tl.arange(0, _ROWS), num_rows, WINDOW)
        counts += tl.sum(tl.cdiv(tiles[None, :], chunks[:, None]), 1)
    turns = tl.cdiv(counts * num_kv_heads, num_programs)
    cost = tl.where(counts <= capacity, turns * (chunks + _ITEM_COST), 2**31 - 1)
    return tl.sum(tl.where(index == tl.argmin(cost, 0), chunks, 0))


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def _build(
    kv_lens,
    num_rows,
    items,
    row_items,
    sizes,
    capacity,
    num_programs,
    num_kv_heads,
    WINDOW: tl.constexpr,
):
    chunk = _best_chunk(kv_lens, num_rows, capacity, num_programs, num_kv_heads, WINDOW)
    total = 0
    tl.store(row_items, 0)
    for first in range(0, num_rows, _LISTED):
        rows = first + tl.arange(0, _LISTED)
        is_row = rows < num_rows
        pieces = tl.cdiv(_num_tiles(kv_lens, rows, num_rows, WINDOW), chunk)
        ends = total + tl.cumsum(pieces, 0)
        tl.store(row_items + 1 + rows, ends, mask=is_row)
        tile = first_tile(tl.load(kv_lens + rows, mask=is_row, other=0), WINDOW)
        for piece in range(0, tl.max(pieces, 0)):
            item = items + 2 * (ends - pieces + piece)
            tl.store(item, rows, mask=piece < pieces)
            tl.store(item + 1, tile + piece * chunk, mask=piece < pieces)
        total += tl.sum(pieces)
    tl.store(sizes, total)
    tl.store(sizes + 1, chunk)
