"""Pages of layers with a window: a running request holds those of its last tokens, and the tree some tails.

Where a model mixes layers with a window and layers without, pages of the latter lie in the tree, for whole
prefixes; those of the former are of no use behind the window. A *row* is their pages for `page_size` tokens, one
for each group of such layers, and a *tail* the rows from which a request can resume. In pages of 16, window 20:

    the tree              [ 0 ... 16 | 16 .. 32 | 32 .. 48 | 48 .. 64 | 64 .. 80 | 80 .. 96 ]     other layers
    a request at 87                                        [ row      | row      | row      ]
    the tail of 80                                         [ row      | row      ]

Full rows are never written again, so requests and tails share them: a tail takes no memory while the request that
left it needs the same rows. Both kinds of pages come from one pool, so nothing is divided between them beforehand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cache.node import Node
from cache.page_pool import PagePool
from cache.resume.resume_points import ResumePoints

Row = tuple[int, ...]
"""Pages of the same `page_size` tokens, one for each group of layers with a window."""


class Window(NamedTuple):
    """The layers with a window of a model, as the cache knows them."""

    num_tokens: int
    """How many last positions a token sees at most in such a layer, its own included."""
    num_groups: int
    """Pages that these layers need for `page_size` tokens."""
    max_chunk: int
    """Most tokens of one request in a step."""

    def first_needed(self, num_tokens: int, page_size: int) -> int:
        """Return the first slot of the page table that is needed after `num_tokens` tokens, and after fewer in the
        same page, whose tail may be kept.
        """
        return max(0, num_tokens - num_tokens % page_size - self.num_tokens + 1) // page_size

    def most_rows(self, page_size: int) -> int:
        """Return how many rows a request holds at most: those of a window and of the chunk after it."""
        return -(-(self.num_tokens + self.max_chunk) // page_size) + 2

    def most_slots(self, num_pages: int, page_size: int) -> int:
        """Return how many slots the page table of a request can have that has so many pages for everything."""
        in_rows = self.pages_for(num_pages, page_size)
        return max(num_pages - in_rows, num_pages // (1 + self.num_groups))

    def pages_for(self, num_slots: int, page_size: int) -> int:
        """Return how many pages in rows a request needs at most whose page table has `num_slots` slots."""
        return self.num_groups * min(num_slots, self.most_rows(page_size))


class WindowTails(ResumePoints):
    """Owns the rows. Tails are the states that nodes carry, by numbers."""

    def __init__(self, window: Window, page_size: int, pool: PagePool) -> None:
        super().__init__()
        self.window, self.page_size = window, page_size
        self._pool = pool
        self._tails: dict[int, Sequence[Row]] = {}
        self._num_made = 0
        self.uses: dict[int, tuple[int, int]] = {}
        """By the first page of a row, how many requests and how many tails use it."""
        self._num_rows = Counter[tuple[bool, bool]]()  # (requests use the row, tails use it) -> rows

    @property
    def evictable_pages(self) -> int:
        """Pages that dropping all tails would free. O(1)."""
        return self._num_rows[False, True] * self.window.num_groups

    @property
    def locked_pages(self) -> int:
        """Pages that requests use and tails hold."""
        return self._num_rows[True, True] * self.window.num_groups

    @property
    def private_pages(self) -> int:
        """Pages that only requests use."""
        return self._num_rows[True, False] * self.window.num_groups

    @property
    def pinned_pages(self) -> int:
        """Pages of tails that are kept for good. O(their number)."""
        pinned = [node.resume_point for node in self.pins if node.resume_point is not None]
        rows = {row for tail in pinned for row in self._tails[tail]}
        return len(rows) * self.window.num_groups

    def rows_at(self, node: Node) -> Sequence[Row]:
        """Return the rows of a node's tail."""
        assert node.resume_point is not None
        return self.rows_of(node.resume_point)

    def rows_of(self, tail: int) -> Sequence[Row]:
        """Return the rows that hold the tail of a resume point."""
        return self._tails[tail]

    def take(self, num_rows: int) -> list[Row]:
        """Take rows for a request from the free pages. Raises OutOfPages, with nothing changed."""
        pages, size = self._pool.allocate(num_rows * self.window.num_groups), self.window.num_groups
        rows = [tuple(pages[first : first + size]) for first in range(0, len(pages), size)]
        self.hold(rows)
        return rows

    def hold(self, rows: Sequence[Row]) -> None:
        """Let one more request use rows."""
        self._count(rows, 1, 0)

    def leave(self, rows: Sequence[Row]) -> None:
        """Undo one `hold`; pages without a user are free."""
        self._count(rows, -1, 0)

    def make(self, rows: Sequence[Row]) -> int:
        """Make a tail, which shares the rows of the request that asks for it. It counts as a request until a node
        carries it: only then can it be given up.
        """
        self._num_made += 1
        self._tails[self._num_made] = rows
        self.hold(rows)
        return self._num_made

    def free(self, tail: int) -> None:
        """Give up a tail that no node carries."""
        self.leave(self._tails.pop(tail))

    def _carried(self, tail: int) -> None:
        self._count(self._tails[tail], -1, 1)

    def _dropped(self, tail: int) -> None:
        self._count(self._tails.pop(tail), 0, -1)

    def pin(self, node: Node) -> int:
        """Keep a node's tail until `unpin`. Its rows count as used."""
        self.hold(self.rows_at(node))
        return super().pin(node)

    def unpin(self, node: Node) -> None:
        """Undo one `pin`."""
        super().unpin(node)
        self.leave(self.rows_at(node))

    def give_up_before(self, leaf: Node | None) -> bool:
        """Give up the least recently used tail if `leaf`, the next to be evicted, was used since, or is None;
        return whether there was one. It may free no page, where other tails or requests use its rows.
        """
        if not self._idle:
            return False
        node, used_at = next(iter(self._idle.items()))
        if leaf is not None and leaf.last_access <= used_at:
            return False
        self.give_up(node)
        return True

    def drop_all(self) -> None:
        """Drop all tails that may be given up."""
        for node in list(self._idle):
            self.drop(node)

    def _count(self, rows: Sequence[Row], by_requests: int, by_tails: int) -> None:
        for row in rows:
            before = self.uses.get(row[0], (0, 0))
            after = before[0] + by_requests, before[1] + by_tails
            if any(before):
                self._num_rows[before[0] > 0, before[1] > 0] -= 1
            if any(after):
                self.uses[row[0]] = after
                self._num_rows[after[0] > 0, after[1] > 0] += 1
            else:
                del self.uses[row[0]]
                self._pool.free(row)


class LeaseWindow:
    """The rows of one lease, for the tokens from which its next one can be computed, and those of planned chunks.

    Steps run in the order in which they were planned, so what no chunk from now on needs may be given to others,
    who write in later steps.
    """

    def __init__(self, tails: WindowTails, origin: Node | None) -> None:
        """Resume from the tail of `origin`; None: from the beginning."""
        self._tails, self._page_size = tails, tails.page_size
        self.rows: list[Row] = []
        self.first = 0
        """The slot of the page table that `rows[0]` fills."""
        self.kept: list[tuple[int, int]] = []
        """Positions after which tails are kept that no node carries yet, and the tails."""
        self.is_awaited = False
        """Whether its first chunk begins with rows that are to be filled before it (`await_at`)."""
        if origin is not None:
            self.rows = list(tails.rows_at(origin))
            self.first = origin.end // self._page_size - len(self.rows)
            tails.hold(self.rows)
            tails.use(origin)

    def await_at(self, num_tokens: int) -> None:
        """Resume after so many tokens, from rows that `grow` takes and a copy fills before the first chunk."""
        assert not self.rows
        self.first, self.is_awaited = self._tails.window.first_needed(num_tokens, self._page_size), True

    def rows_before(self, num_tokens: int) -> list[Row]:
        """Return the rows from which a request can resume after so many tokens: those of computed ones."""
        first = self._tails.window.first_needed(num_tokens, self._page_size)
        return self.rows[first - self.first : -(-num_tokens // self._page_size) - self.first]

    @property
    def num_slots(self) -> int:
        """Slots of the page table up to the end of the last row."""
        return self.first + len(self.rows)

    @property
    def num_pages(self) -> int:
        """Pages in its rows."""
        return len(self.rows) * self._tails.window.num_groups

    def pages_missing(self, num_slots: int) -> int:
        """Count the pages that rows up to `num_slots` slots lack."""
        return max(0, num_slots - self.num_slots) * self._tails.window.num_groups

    def most_missing(self, num_slots: int) -> int:
        """Count the pages that it lacks to get to `num_slots` slots, chunk by chunk, at the worst moment."""
        most = min(num_slots - self.first, self._tails.window.most_rows(self._page_size))
        return max(0, most - len(self.rows)) * self._tails.window.num_groups

    def give_back(self, start: int) -> None:
        """Leave the rows that no chunk from position `start` on needs."""
        count = self._tails.window.first_needed(start, self._page_size) - self.first
        if count > 0:
            self._tails.leave(self.rows[:count])
            del self.rows[:count]
            self.first += count

    def grow(self, num_slots: int) -> None:
        """Take rows up to `num_slots` slots. Raises OutOfPages, with nothing changed."""
        if num_slots > self.num_slots:
            self.rows += self._tails.take(num_slots - self.num_slots)

    def plan(self, start: int, end: int, borders: Sequence[int], *, has_drafts: bool) -> None:
        """Note that a chunk of the tokens `start` to `end` is planned, and keep the tails at `borders` (start <=
        border < end), which are multiples of the page size.
        """
        self.is_awaited = False
        for border in borders:
            self._keep(border)

    def release_origin(self) -> None:
        """Do nothing: the rows with which it began are its own as well."""

    def keeps_between(self, first: int, last: int) -> bool:
        """Whether a tail is kept after `first`, up to `last`, that no node carries yet."""
        return any(first < position <= last for position, _ in self.kept)

    def take_kept(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return positions and tails that are computed, as `num_tokens` tokens are; they are the caller's now."""
        done = [place for place in self.kept if place[0] <= num_tokens]
        self.kept = self.kept[len(done) :]
        return done

    def end_at(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return what `take_kept` does, with the tail at the last page's border. Everything else is left."""
        border = num_tokens - num_tokens % self._page_size
        if border and all(position != border for position, _ in self.kept):
            self._keep(border)
        done = self.take_kept(num_tokens)
        for _, tail in self.kept:
            self._tails.free(tail)
        self._tails.leave(self.rows)
        self.rows, self.kept = [], []
        return done

    def _keep(self, border: int) -> None:
        start, end = self._tails.window.first_needed(border, self._page_size), border // self._page_size
        if self.first <= start and end <= self.num_slots:
            tail = self._tails.make(self.rows[start - self.first : end - self.first])
            self.kept.append((border, tail))
            self.kept.sort()
