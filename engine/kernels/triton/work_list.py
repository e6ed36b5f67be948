"""The work list of a decode step, which assigns pieces of rows' KV to programs. Made once per step, on the device.

    tiles of KV   row 0 ########   row 1 ###   row 2 #####          chunk: 3 tiles
    items         0,0  0,3  0,6    1,0         2,0  2,3             (row, first tile)
    row_parts     0                3           4           6

Each item is computed for every KV head, and has room for a partial result of its row. Programs take items in turn,
so the time of a step is the number of turns times the length of one. The chunk length minimizes it: many pieces
for a few long rows, whole rows if there are many. The host is not involved: sizes of launches and buffers depend
only on the number of rows.

Shared prefixes of groups of rows (`engine.kernels.triton.shared_prefixes`) are cut likewise, into items of a
separate list. Such an item gives a partial result for each row of the group, before those of the row's own items:

    shared items  0,0  0,4   for rows 0 and 2, which share 8 tiles
    row_parts     0 (0,0) (0,4) (0,8) ...     row 0: two of the group, then its own
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import launch
from engine.kernels.triton.shared_prefixes import RowGroups
from engine.kernels.triton.tile import TILE, start

_CHUNKS = tl.constexpr(64)
"""Number of chunk lengths that are considered: four per octave, 1 to 57,344 tiles."""
_ROWS = tl.constexpr(32)
"""Rows examined together."""
_LISTED = tl.constexpr(128)
"""Rows whose items are written together: a constant, so that one kernel lists any number of rows."""
_CLEARED = tl.constexpr(1024)
_ITEM_COST = tl.constexpr(1)
"""Cost of starting and merging an item, in tiles."""
_TURNS = 4
"""Maximum number of turns, beyond whole rows, for which there is room."""
_SHARED_PARTS = 4
"""Mean number of partial results of shared items per row for which there is room."""


class WorkList:
    """The items of up to `max_rows` rows. Its tensors have fixed addresses: `build` fills them again."""

    def __init__(
        self,
        max_rows: int,
        num_kv_heads: int,
        num_programs: int,
        device: torch.device,
        groups: RowGroups | None = None,
        num_shared_programs: int = 1,
    ) -> None:
        """The list is for launches of `num_programs` programs, and others for the shared prefixes of `groups`."""
        self.num_programs, self.num_shared_programs, self.groups = num_programs, num_shared_programs, groups
        self._num_kv_heads = num_kv_heads
        self._capacity = max_rows + _TURNS * -(-num_programs // num_kv_heads)
        self._shared_capacity = 0
        if groups is not None:
            self._shared_capacity = _SHARED_PARTS * (max_rows + -(-num_shared_programs // num_kv_heads))

        def numbers(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        self.capacity = self._capacity + self._shared_capacity
        """Maximum number of partial results."""
        self.items = numbers(self._capacity, 2)
        """int32: row and first tile."""
        self.shared_items = numbers(self._shared_capacity, 2)
        """int32: the row that leads a part of a group, and first tile."""
        self.row_parts = numbers(max_rows + 1)
        """int32: row r's partial results are row_parts[r] .. row_parts[r + 1]."""
        self.sizes = numbers(4)
        """int32: number of items, tiles per chunk; the same for shared items."""
        self.arrived = numbers(max_rows, num_kv_heads)
        """int32: computed items of a row and a KV head; zero again when all are computed."""

    def build(self, kv_lens: torch.Tensor, window: int | None) -> None:
        """Make the items of rows with int32 [R] positions and one query at the last; empty rows get one without
        tiles. The groups, if there are any, are those of these rows.
        """
        tiles, leaders = (kv_lens, kv_lens) if self.groups is None else (self.groups.tiles, self.groups.leaders)
        launch(
            _build,
            (1,),
            kv_lens,
            len(kv_lens),
            tiles,
            leaders,
            self.items,
            self.shared_items,
            self.row_parts,
            self.sizes,
            self.arrived,
            self._capacity,
            self._shared_capacity,
            self.num_programs,
            self.num_shared_programs,
            self._num_kv_heads,
            WINDOW=window or 0,
            HAS_GROUPS=self.groups is not None,
        )


@triton.jit
def first_tile(kv_len, shared, WINDOW: tl.constexpr, HAS_GROUPS: tl.constexpr):
    """Return a row's first own tile: the one after those `shared`, or that of the first position that a query at
    position kv_len - 1 sees. WINDOW 0: position 0.
    """
    if HAS_GROUPS:
        return shared
    if WINDOW == 0:
        return kv_len * 0
    return tl.maximum(kv_len - WINDOW, 0) // TILE


@triton.jit
def _own_tiles(kv_lens, tiles, rows, num_rows, WINDOW: tl.constexpr, HAS_GROUPS: tl.constexpr):
    """Return the first own tile of each row, and the number of them, at least one; zero for missing rows."""
    is_row = rows < num_rows
    lengths = tl.load(kv_lens + rows, mask=is_row, other=0)
    shared = tl.load(tiles + rows, mask=is_row, other=0)
    first = first_tile(lengths, shared, WINDOW, HAS_GROUPS)
    return first, tl.where(is_row, tl.maximum(tl.cdiv(lengths, TILE) - first, 1), 0)


@triton.jit
def _chunk_of(index):
    return ((4 + index % 4) << (index // 4)) >> 2


@triton.jit
def _cheapest(counts, parts, capacity, num_programs, num_kv_heads):
    """Return the chunk length with the least cost, given the items and partial results of each."""
    index = tl.arange(0, _CHUNKS)
    chunks = _chunk_of(index)
    turns = tl.cdiv(counts * num_kv_heads, num_programs)
    cost = tl.where(parts <= capacity, turns * (chunks + _ITEM_COST), 2**31 - 1)
    return tl.sum(tl.where(index == tl.argmin(cost, 0), chunks, 0))


@triton.jit
def _best_chunk(
    kv_lens,
    tiles,
    num_rows,
    capacity,
    num_programs,
    num_kv_heads,
    WINDOW: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
):
    chunks = _chunk_of(tl.arange(0, _CHUNKS))
    counts = tl.zeros([_CHUNKS], dtype=tl.int32)
    for first in range(0, num_rows, _ROWS):
        _, own = _own_tiles(kv_lens, tiles, first + tl.arange(0, _ROWS), num_rows, WINDOW, HAS_GROUPS)
        counts += tl.sum(tl.cdiv(own[None, :], chunks[:, None]), 1)
    return _cheapest(counts, counts, capacity, num_programs, num_kv_heads)


@triton.jit
def _best_shared_chunk(tiles, leaders, num_rows, capacity, num_programs, num_kv_heads):
    chunks = _chunk_of(tl.arange(0, _CHUNKS))
    counts = tl.zeros([_CHUNKS], dtype=tl.int32)
    parts = tl.zeros([_CHUNKS], dtype=tl.int32)
    for first in range(0, num_rows, _ROWS):
        rows = first + tl.arange(0, _ROWS)
        shared = tl.load(tiles + rows, mask=rows < num_rows, other=0)
        pieces = tl.cdiv(shared[None, :], chunks[:, None])
        leads = tl.load(leaders + rows, mask=rows < num_rows, other=-1) == rows
        counts += tl.sum(tl.where(leads[None, :], pieces, 0), 1)
        parts += tl.sum(pieces, 1)
    return _cheapest(counts, parts, capacity, num_programs, num_kv_heads)


@triton.jit
def _list_items(items, rows, tile, pieces, total, chunk):
    """Write the items of these rows after `total` others, and return the new total."""
    begins = total + tl.cumsum(pieces, 0) - pieces
    for piece in range(0, tl.max(pieces, 0)):
        item = items + 2 * (begins + piece)
        tl.store(item, rows, mask=piece < pieces)
        tl.store(item + 1, tile + piece * chunk, mask=piece < pieces)
    return total + tl.sum(pieces)


@triton.jit(do_not_specialize=["num_rows", "capacity", "shared_capacity"])
def _build(
    kv_lens,
    num_rows,
    tiles,
    leaders,
    items,
    shared_items,
    row_parts,
    sizes,
    arrived,
    capacity,
    shared_capacity,
    num_programs,
    num_shared_programs,
    num_kv_heads,
    WINDOW: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    for first in range(0, num_rows * num_kv_heads, _CLEARED):
        places = first + tl.arange(0, _CLEARED)
        tl.store(arrived + places, 0, mask=places < num_rows * num_kv_heads)
    chunk = _best_chunk(kv_lens, tiles, num_rows, capacity, num_programs, num_kv_heads, WINDOW, HAS_GROUPS)
    shared_chunk = 1
    if HAS_GROUPS:
        shared_chunk = _best_shared_chunk(
            tiles, leaders, num_rows, shared_capacity, num_shared_programs, num_kv_heads
        )
    total, total_shared, total_parts = 0, 0, 0
    tl.store(row_parts, 0)
    for first in range(0, num_rows, _LISTED):
        rows = first + tl.arange(0, _LISTED)
        tile, own = _own_tiles(kv_lens, tiles, rows, num_rows, WINDOW, HAS_GROUPS)
        pieces = tl.cdiv(own, chunk)
        total = _list_items(items, rows, tile, pieces, total, chunk)
        parts = pieces
        if HAS_GROUPS:
            shared = tl.cdiv(tl.load(tiles + rows, mask=rows < num_rows, other=0), shared_chunk)
            leads = tl.load(leaders + rows, mask=rows < num_rows, other=-1) == rows
            led = tl.where(leads, shared, 0)
            total_shared = _list_items(shared_items, rows, tile * 0, led, total_shared, shared_chunk)
            parts += shared
        tl.store(row_parts + 1 + rows, total_parts + tl.cumsum(parts, 0), mask=rows < num_rows)
        total_parts += tl.sum(parts)
    tl.store(sizes, total)
    tl.store(sizes + 1, chunk)
    tl.store(sizes + 2, total_shared)
    tl.store(sizes + 3, shared_chunk)
