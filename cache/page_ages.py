"""How long pages live and lie idle before they are evicted: what tells whether the memory is large enough.

Watches one page id in so many; any page may get any id, so these are a fair sample of all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

_WATCHED = 512
"""Page ids watched, at most twice as many: what this costs does not grow with the memory."""
_KEPT = 4096
"""Evictions remembered until they are drained; older ones are forgotten."""


class EvictedPage(NamedTuple):
    """Of one watched page, when it was evicted to make room. In seconds."""

    lifetime: float
    """Since it was taken from the free ones."""
    idle: float
    """Since the last use of what it held."""


class PageAges:
    """`drain` may be called from any thread, everything else belongs to the cache's."""

    def __init__(self, num_pages: int) -> None:
        self._stride = max(1, num_pages // _WATCHED)
        self._taken_at: dict[int, float] = {}
        self._evicted: deque[EvictedPage] = deque(maxlen=_KEPT)

    def taken(self, pages: Iterable[int], now: float) -> None:
        """These pages were free until now."""
        for page in pages:
            if page % self._stride == 0:
                self._taken_at[page] = now

    def evicted(self, pages: Iterable[int], last_access: float, now: float) -> None:
        """These pages are free from now on; what they held was used last at `last_access`."""
        for page in pages:
            if page % self._stride == 0 and page in self._taken_at:
                self._evicted.append(EvictedPage(now - self._taken_at[page], max(now - last_access, 0.0)))

    def drain(self) -> list[EvictedPage]:
        """The evictions since the last call."""
        drained = []
        while self._evicted:
            drained.append(self._evicted.popleft())
        return drained
