"""Which request has which row of the device's state, and what has to be written there before a step of decodes.

    row      0   1   2   3 ...              a row that nobody has: position 0, its KV in the page of empty rows
    request  a   b   c   -
             a   c   -   -    b has left: the last row takes its place, so that the rows in use are the first ones
             a   c   d   -    d has come

The device advances rows by itself: a step writes tokens and positions for the one after it. So a row is written
when a request comes, when it got a page, and when something else has computed its tokens meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache import Lease
from engine.request import PENDING
from engine.sampling.graph_chooser import inverse_temperature
from engine.scheduling.plan import Chunk

# The fields, by the words of a row that come before them.
SEED, INVERSE, POSITION, TOKEN, IN_USE, NUM_PROMPT, TABLE = 0, 2, 4, 5, 6, 7, 8


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the fields of all rows lie in one array of int32 words: those of a field side by side, row by row.

    seed (2 words) | inverse temperature (2) | position | token | whether in use | prompt length | page table
    """

    max_rows: int
    max_pages: int
    """Of a page table."""
    page_size: int
    """Tokens."""
    empty_page: int
    """Where rows that nobody has write their KV."""
    null_page: int
    """What fills page tables up."""

    @property
    def num_words(self) -> int:
        """Of all rows."""
        return self.max_rows * (TABLE + self.max_pages)

    def field(self, index: int) -> int:
        """The first word of a field, of row 0."""
        return index * self.max_rows

    def table(self, row: int) -> int:
        """The first word of a row's page table."""
        return self.field(TABLE) + row * self.max_pages


@dataclass(frozen=True, slots=True)
class RowChanges:
    """What to write before a step."""

    number: int
    """Counts the steps: they build on one another."""
    rows: Sequence[int]
    """The row of each of the step's chunks: together 0 .. len(rows)."""
    packet: npt.NDArray[np.int64] | None
    """`num_words` places of words, what to write there; then rows, and which tokens of the step before they begin
    with. None: nothing."""
    num_words: int
    is_anew: bool
    """Whether all rows are to be emptied before."""


@dataclass(slots=True)
class _Held:
    """What a row of the device holds."""

    request_id: str
    lease: Lease | None
    node: object
    num_shared: int
    num_pages: int
    """In its page table."""
    position: int
    """Of the token that it computes next, if nobody else does."""


class RowAssigner:
    """The host's account of the device's rows. For one thread."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self._held: list[_Held] = []
        self._row_of: dict[str, int] = {}
        self._is_anew = True
        self._number = -1

    def forget(self) -> None:
        """What the device holds is unknown: all rows are written anew."""
        self._held, self._row_of, self._is_anew = [], {}, True

    def place(self, chunks: Sequence[Chunk], before: dict[str, int]) -> RowChanges:
        """Rows for a step of decodes, one token each, which the device will advance.

        before: by request id, the row of what the step before samples; needed for tokens that are `PENDING`.
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
                if token == PENDING:  # any row for a request whose step failed: it has ended
                    taken[row] = before.get(held.request_id, 0)
                else:
                    words[self._layout.field(TOKEN) + row] = token
            held.position = chunk.start + 1
        is_anew, self._is_anew = self._is_anew, False
        self._number += 1
        return RowChanges(self._number, rows, _packet(words, taken), len(words), is_anew)

    def _assign(self, chunks: Sequence[Chunk], words: dict[int, int]) -> list[int]:
        """The row of each chunk's request. Who left is forgotten, who came or had to move is written."""
        count = len(chunks)
        rows = [self._row_of.get(chunk.request.request_id, count) for chunk in chunks]
        if max(rows) >= count or len(self._held) > count:
            staying = {row for row in rows if row < count}
            free = [row for row in range(count - 1, -1, -1) if row not in staying]
            left = {row: self._held[row] for row in free if row < len(self._held)}
            for row in range(count, len(self._held)):
                self._clear(row, words)
            del self._held[count:]
            self._held += [_NOBODY] * (count - len(self._held))
            for index, chunk in enumerate(chunks):
                if rows[index] >= count:
                    rows[index] = row = free.pop()
                    self._come(row, chunk, left.get(row), words)
            self._row_of = {held.request_id: row for row, held in enumerate(self._held)}
        for row, chunk in zip(rows, chunks, strict=True):
            held, lease = self._held[row], chunk.request.lease
            if held.lease is not lease or (lease is None and held.position >= 0):  # another of that name, or back
                self._come(row, chunk, held, words)
        return rows

    def _come(self, row: int, chunk: Chunk, before: _Held | None, words: dict[int, int]) -> None:
        """Write all of a row but its token, position and pages, which the device then does not have."""
        request, field = chunk.request, self._layout.field
        _write(words, field(SEED) + 2 * row, np.array([request.seed & (2**64 - 1)], dtype=np.uint64))
        _write(words, field(INVERSE) + 2 * row, np.array([inverse_temperature(request.sampling)]))
        words[field(IN_USE) + row] = 1
        words[field(NUM_PROMPT) + row] = request.num_prompt
        if before is not None:  # of its predecessor's page table nothing stays
            self._fill(row, range(1, before.num_pages), words)
        self._held[row] = _Held(request.request_id, request.lease, None, -1, 0, -1)

    def _clear(self, row: int, words: dict[int, int]) -> None:
        """Make a row look as if nobody had ever had it."""
        field, table = self._layout.field, self._layout.table(row)
        for word in (field(SEED) + 2 * row, field(INVERSE) + 2 * row):
            words[word] = words[word + 1] = 0
        for index in (POSITION, TOKEN, IN_USE, NUM_PROMPT):
            words[field(index) + row] = 0
        self._fill(row, range(1, self._held[row].num_pages), words)
        words[table] = self._layout.empty_page

    def _fill(self, row: int, slots: range, words: dict[int, int]) -> None:
        table = self._layout.table(row)
        words.update(dict.fromkeys(range(table + slots.start, table + slots.stop), self._layout.null_page))

    def _write_pages(self, row: int, held: _Held, chunk: Chunk, words: dict[int, int]) -> None:
        """The pages that the row lacks. The cache exchanges pages of the table only with the lease's node."""
        count, lease = chunk.start // self._layout.page_size + 1, held.lease
        if lease is not None and (held.node is not lease.node or held.num_shared != lease.num_shared):
            held.node, held.num_shared = lease.node, lease.num_shared
            first = 0
        else:
            first = held.num_pages
        if first < count:
            table = self._layout.table(row)
            words.update(zip(range(table + first, table + count), chunk.pages[first:count], strict=True))
            held.num_pages = max(held.num_pages, count)


_NOBODY = _Held("", None, None, -1, 0, -1)


def _write(words: dict[int, int], start: int, value: npt.NDArray[np.generic]) -> None:
    words.update(enumerate(value.view(np.int32).tolist(), start))


def _packet(words: dict[int, int], taken: dict[int, int]) -> npt.NDArray[np.int64] | None:
    if not words and not taken:
        return None
    parts: Iterable[Iterable[int]] = (words.keys(), words.values(), taken.keys(), taken.values())
    return np.array([value for part in parts for value in part], dtype=np.int64)
