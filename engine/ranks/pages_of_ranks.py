"""The pages that several ranks share, as the page mover sees them: the ranks' parts in order.

reading   rank 0 ── LendPage ──▶ other ranks ── PagePart ──▶ rank 0: its own part, those of 1, 2, ...
write     rank 0 ── StorePage ─▶ other ranks ── StoredPage ─▶ rank 0
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.attention.page_memory import BytesOfPages
from engine.host_tier.peers import PageReading
from engine.ranks.messages import LendPage, PagePart, StoredPage

_MOST_UNSTORED = 32
"""Most pages on their way to a rank, which may wait there while it computes a step."""
_STORE_S = 60.0
"""Seconds to wait for a rank that stores nothing; others notice the end of the rank or of its step.
"""


class LendingRanks(Protocol):
    """The part of `RankGroup` that is used here."""

    size: int

    def lend_page(self, task: LendPage) -> None:
        """Let the other ranks send their parts of a page."""

    def store_page(self, page: int, parts: Sequence[memoryview]) -> None:
        """Let the other ranks store their parts of a page."""

    def on_part(self, call: Callable[[PagePart | StoredPage], None], part_bytes: int) -> None:
        """Call `call` with the parts that the other ranks send, and with those that they have stored."""


class PagesOfRanks:
    """Implements `PageMemory`. Pages can be read and written in any thread."""

    def __init__(self, own: BytesOfPages, ranks: LendingRanks, part_bytes: Sequence[int]) -> None:
        """`own` has the first rank's parts; `part_bytes`: bytes of each rank's part."""
        self.identity = json.dumps({"rank": json.loads(own.identity), "ranks": ranks.size}, sort_keys=True)
        self.page_bytes = sum(part_bytes)
        self._ends = list(itertools.accumulate(part_bytes))
        self._own, self._ranks = own, ranks
        self._numbers = itertools.count()
        self._awaited: dict[int, _Parts] = {}
        self._on_read: Callable[[], None] = lambda: None
        self._num_unstored = 0
        self._stored = threading.Condition()
        ranks.on_part(self._take, max(part_bytes))

    def reading(self, is_device: bool, page: int) -> _Parts:
        """Implement `PageMemory`."""
        number = next(self._numbers)
        parts = self._awaited[number] = _Parts(self._own.reading(is_device, page), self._ranks.size - 1)
        self._ranks.lend_page(LendPage(number, is_device, page))
        return parts

    def on_read(self, call: Callable[[], None]) -> None:
        """Implement `PageMemory`."""
        self._on_read = call

    def write(self, page: int, data: memoryview) -> None:
        """Implement `PageMemory`. Waits while the other ranks have many pages to store."""
        others = self._ranks.size - 1
        with self._stored:
            self._stored.wait_for(lambda: self._num_unstored < _MOST_UNSTORED * others, _STORE_S)
            self._num_unstored += others
        self._ranks.store_page(page, [data[start:end] for start, end in itertools.pairwise(self._ends)])
        self._own.write(page, data[: self._ends[0]])

    def regions(self) -> None:
        """Implement `PageMemory`: each rank is a separate process."""

    def _take(self, report: PagePart | StoredPage) -> None:
        if isinstance(report, StoredPage):
            with self._stored:
                self._num_unstored -= 1
                self._stored.notify()
            return
        parts = self._awaited[report.number]
        parts.add(report.rank, report.data)
        if parts.is_ready():  # even if its reader no longer waits
            del self._awaited[report.number]
            self._on_read()


class _Parts:
    """A page whose parts come from all ranks. Implements `PageReading`."""

    def __init__(self, own: PageReading, num_others: int) -> None:
        self._own, self._num_others = own, num_others
        self._others: dict[int, memoryview] = {}

    def add(self, rank: int, data: memoryview) -> None:
        """Take another rank's part."""
        self._others[rank] = data

    def is_ready(self) -> bool:
        """Implement `PageReading`."""
        return len(self._others) == self._num_others

    def take(self) -> bytes:
        """Implement `PageReading`."""
        return b"".join((self._own.take(), *(self._others[rank] for rank in sorted(self._others))))
