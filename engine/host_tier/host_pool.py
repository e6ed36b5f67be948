"""The pool of host pages: their owners, and when they can be reused.

Preempted requests (`swap`) and evicted prefixes (`host_prefixes`) share them, with the recurrent states and the
windows from which these resume (`host_resume_points`). A preempted request takes pages of prefixes that no request
reads, because it is certain to need its KV again; a prefix takes no pages of requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from cache.news.prefix_log import PrefixLog
from cache.tiers.page_tier import PageTier
from engine.values.plan import PagePair, StateCopy


class Copies(NamedTuple):
    """The copies of a step to the host, or from it."""

    pages: list[PagePair]
    states: list[StateCopy]

    def add(self, others: Copies) -> None:
        """Add other copies to these."""
        self.pages.extend(others.pages)
        self.states.extend(others.states)


class HostAccount(NamedTuple):
    """Host pages by state. Each is in one state, so `total` is always the size of the pool."""

    free: int = 0
    held: int = 0
    """Pages with KV of preempted requests, or pages that the latest plan reads for one."""
    cached: int = 0
    """Pages with KV of evicted prefixes."""
    arriving: int = 0
    """Pages being filled with KV of prefixes: from the device, from below, or from another engine."""
    lent: int = 0
    """Pages with KV of evicted prefixes that are lent to other engines, including those that requests read."""

    @property
    def total(self) -> int:
        """All host pages."""
        return sum(self)


class HostMemory(NamedTuple):
    """The host pages of a runner."""

    num_pages: int = 0
    page_seconds: float = 0.0
    """Seconds to copy a page in one direction, as one of many."""
    page_bytes: int = 0
    """Bytes of a page, of this rank."""
    state_pages: int = 0
    """Pages for one recurrent state; 0 in a model without any."""


class HostTraffic(NamedTuple):
    """Pages copied since the start, and the seconds that this saved."""

    pages_out: int = 0
    """Pages copied to the host."""
    pages_in: int = 0
    """Pages copied to the device."""
    page_bytes: int = 0
    saved_seconds: float = 0.0
    """Seconds that computing them would have taken, at the rate measured then, minus the seconds of the copies."""


class HostPool:
    """Owns every host page, for a scheduler whose steps run strictly in the order in which they were planned.

    That order makes reuse safe: host pages that a step reads are free for the next plan.
    """

    def __init__(self, memory: HostMemory, log: PrefixLog | None = None) -> None:
        """`log` records which blocks of prefixes are here."""
        self.num_pages, self.page_seconds, self.page_bytes, self.state_pages = memory
        self.tier = PageTier(log)
        """The pages of prefixes."""
        self.num_evicted = 0
        """Pages of prefixes that were evicted."""
        # A heap with the lowest page first, so that neighbours are copied together.
        self._free = list(range(memory.num_pages))
        self._being_read: list[int] = []

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_being_read(self) -> int:
        """Pages that become free once the step has been planned."""
        return len(self._being_read)

    @property
    def available(self) -> int:
        """Pages that `take` can return."""
        return len(self._free) + self.tier.num_idle

    def take(self, count: int) -> list[int]:
        """Return `count` pages, which must be available: free ones, then those of prefixes."""
        pages: list[int] = []
        while len(pages) < count:
            if self._free:
                pages.append(heapq.heappop(self._free))
                continue
            reclaimed = self.tier.reclaim()
            assert reclaimed, "more host pages were requested than are available"
            self.num_evicted += len(reclaimed)
            self.free(reclaimed)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Return pages to the pool."""
        for page in pages:
            heapq.heappush(self._free, page)

    def free_after_reading(self, pages: Iterable[int]) -> None:
        """Return pages that the step being planned still reads: they are free at the next `begin_step`."""
        self._being_read += pages

    def begin_step(self) -> None:
        """Begin to plan a step, which will run after the copies of all steps before it."""
        self.free(self._being_read)
        self._being_read = []
