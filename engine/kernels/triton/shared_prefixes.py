"""Finds rows of a decode step that begin with the same pages, on the device, so that a CUDA graph can include it.

    block tables   row 0   4 9 2 | 7          rows 0, 2 and 3 are a group: they begin with the same pages.
                   row 1   5 1               A page that several rows have at one place holds the KV of the same
                   row 2   4 9 2 | 3 6        tokens, and so do all pages before it; it is not written any more.
                   row 3   4 9 2 | 8

Each row prefers the prefix that saves most if all rows that begin with it share it; rows that prefer the same one
are its group. Groups with more rows than a program can have are divided into parts of about the same size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import launch
from engine.kernels.triton.launch_config import power_of_2
from engine.kernels.triton.tile import TILE, start

LEAST_SHARED = 512
"""Least positions that a group shares, as on CPUs."""
_ROWS = tl.constexpr(256)
"""Leading rows of a step that are examined: as many as the largest graph has."""


class RowGroups:
    """The groups of up to `max_rows` rows. Its tensors have fixed addresses: `find` fills them again."""

    def __init__(self, max_rows: int, page_size: int, most_members: int, device: torch.device) -> None:
        """`most_members`: most rows of one program."""
        self.page_size, self.most_members = page_size, most_members
        self._preferred = torch.empty(max_rows, dtype=torch.int32, device=device)
        self.tiles = torch.empty(max_rows, dtype=torch.int32, device=device)
        """int32: tiles of KV that a row attends to with its group; 0 for a row in none."""
        self.leaders = torch.empty(max_rows, dtype=torch.int32, device=device)
        """int32: the first row of a row's part of its group; -1 for a row in none."""
        self.members = torch.empty(max_rows, most_members, dtype=torch.int32, device=device)
        """int32: the rows of the part that a row leads, beginning with itself, then -1; undefined for other
        rows."""

    def find(self, block_table: torch.Tensor, kv_lens: torch.Tensor) -> None:
        """Find the groups of rows with int32 [R, P] pages and [R] positions, and one query at the last."""
        rows, width = block_table.shape
        launch(
            _prefer,
            (rows,),
            block_table,
            kv_lens,
            self._preferred,
            rows,
            width.bit_length(),
            block_table.stride(0),
            LEAST=-(-LEAST_SHARED // self.page_size),
            PAGE_SIZE=self.page_size,
            num_warps=8,
        )
        launch(
            _form,
            (rows,),
            block_table,
            self._preferred,
            self.tiles,
            self.leaders,
            self.members,
            rows,
            block_table.stride(0),
            PAGE_SIZE=self.page_size,
            MOST_MEMBERS=self.most_members,
            BLOCK_MEMBERS=power_of_2(self.most_members),
        )


@triton.jit(do_not_specialize=["num_rows", "num_halvings", "table_stride"])
def _prefer(
    block_table,
    kv_lens,
    preferred,
    num_rows,
    num_halvings,
    table_stride,
    LEAST: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write how many pages the program's row prefers to share: 0, or `LEAST` and more."""
    start(PDL)
    row = tl.program_id(0)
    others = tl.arange(0, _ROWS)
    is_row = others < num_rows
    # A row's last position is always its own, even if its pages are full.
    own = (tl.load(kv_lens + row) - 1) // PAGE_SIZE
    most = tl.minimum(tl.load(kv_lens + others, mask=is_row, other=0) - 1, own * PAGE_SIZE + PAGE_SIZE - 1)
    most = tl.maximum(most, 0) // PAGE_SIZE
    mine = block_table + tl.cast(row, tl.int64) * table_stride
    theirs = block_table + others.to(tl.int64) * table_stride
    alike = tl.zeros([_ROWS], dtype=tl.int32)  # the lower bound; `most` is the upper one
    for _ in range(0, num_halvings):
        middle = (alike + most + 1) // 2
        page = tl.load(mine + middle - 1, mask=middle > 0, other=-1)
        other_page = tl.load(theirs + middle - 1, mask=is_row & (middle > 0), other=-1)
        is_same = page == other_page
        alike = tl.where(is_same, middle, alike)
        most = tl.where(is_same, most, tl.maximum(middle - 1, 0))
    alike = tl.where(is_row & (alike >= LEAST) & (row < _ROWS), alike, 0)
    num_alike = tl.sum((alike[None, :] >= alike[:, None]).to(tl.int32), 1)
    saved = (num_alike - 1).to(tl.int64) * alike  # One of them is the row itself.
    best = tl.max(saved, 0)
    pages = tl.max(tl.where((saved == best) & (best > 0), alike, 0), 0)
    tl.store(preferred + row, pages)


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _form(
    block_table,
    preferred,
    tiles,
    leaders,
    members,
    num_rows,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    MOST_MEMBERS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Enter the program's row into its part of the group of those that prefer the same prefix."""
    start(PDL)
    row = tl.program_id(0)
    others = tl.arange(0, _ROWS)
    pages = tl.load(preferred + row)
    is_alike = (others < num_rows) & (pages > 0)
    is_alike = is_alike & (tl.load(preferred + others, mask=is_alike, other=0) == pages)
    last = block_table + tl.maximum(pages - 1, 0)
    page = tl.load(last + tl.cast(row, tl.int64) * table_stride)
    is_alike = is_alike & (tl.load(last + others.to(tl.int64) * table_stride, mask=is_alike, other=-1) == page)
    count = tl.sum(is_alike.to(tl.int32))
    if count > 1:
        places = tl.cumsum(is_alike.to(tl.int32), 0) - 1
        place = tl.sum(tl.where(others == row, places, 0))
        size = tl.cdiv(count, tl.cdiv(count, MOST_MEMBERS))
        first = place // size * size
        leader = tl.sum(tl.where(is_alike & (places == first), others, 0))
        tl.store(tiles + row, pages * PAGE_SIZE // TILE)
        tl.store(leaders + row, leader)
        tl.store(members + leader * MOST_MEMBERS + place - first, row)
        if leader == row:
            beyond = tl.minimum(count - first, size) + tl.arange(0, BLOCK_MEMBERS)
            tl.store(members + row * MOST_MEMBERS + beyond, -1, mask=beyond < MOST_MEMBERS)
    else:
        tl.store(tiles + row, 0)
        tl.store(leaders + row, -1)
