"""Assigns requests to rows of the device's state, and lists the words to write there before a decode step.

    row      0   1   2   3 ...              an empty row: position 0, its KV in the page of empty rows
    request  a   b   c   -
             a   c   -   -    b has left: the last row moves to its place, so that used rows are the first ones
             a   c   d   -    d has joined

The device advances rows by itself: a step writes tokens and positions for the next one. So the host writes a row
only when a request joins, gets a page, or had tokens computed by another kind of step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache import Lease
from engine.attention.batch import pages_of, rows_of
from engine.sampling.graph_chooser import inverse_temperature
from engine.values.plan import Chunk
from engine.values.request import PENDING

# The fields of a row, each identified by the number of words before it.
SEED, INVERSE, TOP_P, MIN_P = 0, 2, 4, 6
POSITION, TOKEN, IN_USE, NUM_PROMPT, TOP_K, STATE, TABLE = 8, 9, 10, 11, 12, 13, 14
_WIDE, _NARROW = (SEED, INVERSE, TOP_P, MIN_P), (POSITION, TOKEN, IN_USE, NUM_PROMPT, TOP_K)
"""Fields of two words and of one, without page tables."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Layout of all rows in one array of int32 words: field by field, and within a field row by row. Fields begin
    at multiples of 16 bytes, like separate tensors, so that the same compiled kernels accept them.

    seed (2 words) | inverse temperature, top-p, min-p (2 each)
    position | token | whether in use | prompt length | top-k | slot of the recurrent state | page tables

    Page tables come last, group of layers by group of layers (`LayerGroups`).
    """

    max_rows: int
    max_pages: int
    """Maximum number of pages in a page table."""
    page_size: int
    """Tokens per page."""
    empty_page: int
    """Page to which empty rows write their KV."""
    null_page: int
    """Page with which page tables are padded."""
    num_groups: int = 1
    """Groups of layers with page tables of their own."""
    empty_state: int = 0
    """Slot to which empty rows write their recurrent state, in models that have one."""

    @property
    def num_words(self) -> int:
        """Number of words of all rows."""
        return self.field(TABLE) + self.num_groups * self.max_rows * self.max_pages

    def field(self, index: int) -> int:
        """Return the place of a field's first word, that of row 0."""
        return index * (-(-self.max_rows // 4) * 4)

    def table(self, row: int, group: int = 0) -> int:
        """Return the place of the first word of a row's page table."""
        return self.field(TABLE) + (group * self.max_rows + row) * self.max_pages


@dataclass(frozen=True, slots=True)
class RowChanges:
    """The words to write before a step."""

    number: int
    """Number of the step. Each step builds on the previous one."""
    rows: Sequence[int]
    """The row of each of the step's chunks: a permutation of 0 .. len(rows)."""
    packet: npt.NDArray[np.int64] | None
    """`num_words` places of words, then their values; then rows, and for each the index of the previous step's
    token with which it starts. None if there is nothing to write."""
    num_words: int
    is_reset: bool
    """Whether to clear all rows first."""


@dataclass(slots=True)
class _Held:
    """The state of a row of the device, as the host knows it."""

    request_id: str
    lease: Lease | None
    node: object
    num_shared: int
    num_pages: int
    """Number of pages in its page table."""
    position: int
    """Position of the token that it computes next, unless another kind of step does."""
    windowed: range = range(1)
    """Slots used in its page tables of layers with a window; in an empty row the first, with the empty page."""
    state: int | None = None
    """Slot of its recurrent state."""


class RowAssigner:
    """Assigns requests to rows and tracks what the device's rows hold. For one thread at a time."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self._held: list[_Held] = []
        self._row_of: dict[str, int] = {}
        self._is_reset = True
        self._number = -1

    def forget(self) -> None:
        """Treat the device's rows as unknown: all of them will be written again."""
        self._held, self._row_of, self._is_reset = [], {}, True

    def place(self, chunks: Sequence[Chunk], before: dict[str, int]) -> RowChanges:
        """Assign rows for a step of decodes, one token each, which the device will advance.

        before: by request id, the row of its token in the previous step; needed for `PENDING` tokens.
        """
        words: dict[int, int] = {}
        taken: dict[int, int] = {}
        rows = self._assign(chunks, words)
        for row, chunk in zip(rows, chunks, strict=True):
            held = self._held[row]
            self._write_pages(row, held, chunk, words)
            if held.position != chunk.start:
                words[self._layout.field(POSITION) + row] = chunk.start
                token = chunk.token_ids[-1]
                if token == PENDING:  # If the request's last step failed it has ended, and any row will do.
                    taken[row] = before.get(held.request_id, 0)
                else:
                    words[self._layout.field(TOKEN) + row] = token
            held.position = chunk.start + 1
            if chunk.state is not None and held.state != chunk.state.target:
                held.state = words[self._layout.field(STATE) + row] = chunk.state.target
        is_reset, self._is_reset = self._is_reset, False
        self._number += 1
        return RowChanges(self._number, rows, _packet(words, taken), len(words), is_reset)

    def _assign(self, chunks: Sequence[Chunk], words: dict[int, int]) -> list[int]:
        """Return the row of each chunk's request. Drops requests that left, writes those that joined or moved."""
        count = len(chunks)
        rows = [self._row_of.get(chunk.request.request_id, count) for chunk in chunks]
        if max(rows) >= count or len(self._held) > count:
            staying = {row for row in rows if row < count}
            free = [row for row in range(count - 1, -1, -1) if row not in staying]
            left = {row: self._held[row] for row in free if row < len(self._held)}
            for row in range(count, len(self._held)):
                self._clear(row, words)
            del self._held[count:]
            self._held += [_EMPTY] * (count - len(self._held))
            for index, chunk in enumerate(chunks):
                if rows[index] >= count:
                    rows[index] = row = free.pop()
                    self._occupy(row, chunk, left.get(row), words)
            self._row_of = {held.request_id: row for row, held in enumerate(self._held)}
        for row, chunk in zip(rows, chunks, strict=True):
            held, lease = self._held[row], chunk.request.lease
            # Another request with the same id, or the same request after it lost its pages.
            if held.lease is not lease or (lease is None and held.position >= 0):
                self._occupy(row, chunk, held, words)
        return rows

    def _occupy(self, row: int, chunk: Chunk, before: _Held | None, words: dict[int, int]) -> None:
        """Write a new occupant's row except for token, position and pages, which `place` then finds missing."""
        request, field = chunk.request, self._layout.field
        _write(words, field(SEED) + 2 * row, np.array([request.seed & (2**64 - 1)], dtype=np.uint64))
        asked = request.sampling
        for index, value in ((INVERSE, inverse_temperature(asked)), (TOP_P, asked.top_p), (MIN_P, asked.min_p)):
            _write(words, field(index) + 2 * row, np.array([value]))
        words[field(TOP_K) + row] = asked.top_k
        words[field(IN_USE) + row] = 1
        words[field(NUM_PROMPT) + row] = request.num_prompt
        before = before or _EMPTY  # Nothing remains of its predecessor's page tables.
        self._fill(row, range(1, before.num_pages), words)
        self._fill_windowed(row, before.windowed, words)
        self._held[row] = _Held(request.request_id, request.lease, None, -1, 0, -1, range(0))

    def _clear(self, row: int, words: dict[int, int]) -> None:
        """Make a row empty, as at the start."""
        field = self._layout.field
        for index in _WIDE:
            words[field(index) + 2 * row] = words[field(index) + 2 * row + 1] = 0
        for index in _NARROW:
            words[field(index) + row] = 0
        if self._held[row].state is not None:
            words[field(STATE) + row] = self._layout.empty_state
        self._fill(row, range(1, self._held[row].num_pages), words)
        self._fill_windowed(row, self._held[row].windowed, words)
        for group in range(self._layout.num_groups):
            words[self._layout.table(row, group)] = self._layout.empty_page

    def _fill(self, row: int, slots: range, words: dict[int, int], group: int = 0) -> None:
        table = self._layout.table(row, group)
        words.update(dict.fromkeys(range(table + slots.start, table + slots.stop), self._layout.null_page))

    def _fill_windowed(self, row: int, slots: range, words: dict[int, int]) -> None:
        for group in range(1, self._layout.num_groups):
            self._fill(row, slots, words, group)

    def _write_pages(self, row: int, held: _Held, chunk: Chunk, words: dict[int, int]) -> None:
        """Write the pages that the row lacks. The cache replaces pages only along with the lease's node."""
        count, lease = chunk.start // self._layout.page_size + 1, held.lease
        if lease is not None and (held.node is not lease.node or held.num_shared != lease.num_shared):
            held.node, held.num_shared = lease.node, lease.num_shared
            first = 0
        else:
            first = held.num_pages
        if first < count:
            table, pages = self._layout.table(row), pages_of(chunk, self._layout.num_groups)
            words.update(zip(range(table + first, table + count), pages[first:count], strict=True))
            held.num_pages = max(held.num_pages, count)
        if self._layout.num_groups > 1:
            self._write_windowed(row, held, chunk, count, words)

    def _write_windowed(self, row: int, held: _Held, chunk: Chunk, count: int, words: dict[int, int]) -> None:
        """Write the missing pages of layers with a window, except those that the window has passed. A lease never
        replaces pages that it has.
        """
        first, pages = rows_of(chunk, count, self._layout.num_groups)
        self._fill_windowed(row, range(held.windowed.start, min(first, held.windowed.stop)), words)
        lacking = max(first, held.windowed.stop)
        for slot, of_groups in enumerate(pages[lacking - first :], lacking):
            for group, page in enumerate(of_groups, 1):
                words[self._layout.table(row, group) + slot] = page
        held.windowed = range(first, count)


_EMPTY = _Held("", None, None, -1, 0, -1)


def _write(words: dict[int, int], start: int, value: npt.NDArray[np.generic]) -> None:
    words.update(enumerate(value.view(np.int32).tolist(), start))


def _packet(words: dict[int, int], taken: dict[int, int]) -> npt.NDArray[np.int64] | None:
    if not words and not taken:
        return None
    parts: Iterable[Iterable[int]] = (words.keys(), words.values(), taken.keys(), taken.values())
    return np.array([value for part in parts for value in part], dtype=np.int64)
