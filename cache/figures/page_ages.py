"""The age of pages at their eviction, and how long they were idle: signs of whether the memory is large enough.

A fixed share of the page ids is watched. Any page may get any id, so these are a fair sample of all pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

_WATCHED = 512
"""Page ids watched, at most twice as many, so that the cost does not grow with the memory."""
_KEPT = 4096
"""Evictions remembered until they are drained; older ones are forgotten."""


class EvictedPage(NamedTuple):
    """A watched page that was evicted to make room. Times in seconds."""

    lifetime: float
    """Time since its allocation."""
    idle: float
    """Time since the last use of its contents."""


class PageAges:
    """Records evictions of watched pages. Any thread may call `drain`; all else belongs to the cache's thread."""

    def __init__(self, num_pages: int) -> None:
        self._stride = max(1, num_pages // _WATCHED)
        self._taken_at: dict[int, float] = {}
        self._evicted: deque[EvictedPage] = deque(maxlen=_KEPT)

    def taken(self, pages: Iterable[int], now: float) -> None:
        """Note pages that were free until now."""
        for page in pages:
            if page % self._stride == 0:
                self._taken_at[page] = now

    def evicted(self, pages: Iterable[int], last_access: float, now: float) -> None:
        """Note pages that are free from now on and whose contents were last used at `last_access`."""
        for page in pages:
            if page % self._stride == 0 and page in self._taken_at:
                self._evicted.append(EvictedPage(now - self._taken_at[page], max(now - last_access, 0.0)))

    def drain(self) -> list[EvictedPage]:
        """Return the evictions since the last call."""
        drained = []
        while self._evicted:
            drained.append(self._evicted.popleft())
        return drained
