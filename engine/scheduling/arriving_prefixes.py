"""Prefixes on their way from a lower tier to host memory, and the requests that wait for them.

    a prompt arrives ──▶ which of its pages lie below? ──▶ loaded into host pages ──▶ its first step copies them
                              │ computing them is sooner            │ late, or lost
                              └────────────────────────────────────▶ computed

A request waits for its pages at most as long as computing them would take, so that it never takes more than twice
as long as the better of both would have. What has arrived by then is used, to the page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from cache.page_keys import PageKeys
from cache.page_tier import TierPage
from engine.scheduling.host_pool import HostPool
from engine.scheduling.lower_tier import LowerTier

_LONGEST_WAIT_S = 30.0
"""A tier that is slower than this has broken down."""


class _Awaited(NamedTuple):
    """What a request waits for."""

    last: bytes
    """Key of the page that arrives last."""
    until: float
    """Clock at which it waits no longer."""


class ArrivingPrefixes:
    """Has pages of host memory written below, and read back for prompts that begin with them."""

    def __init__(self, lower: LowerTier, pool: HostPool, page_size: int) -> None:
        self._lower, self._pool, self._tier = lower, pool, pool.tier
        self._page_size = page_size
        self._awaited: dict[str, _Awaited] = {}
        self._unsaved: deque[TierPage] = deque()
        self._being_saved: dict[int, TierPage] = {}

    def save(self, pages: Iterable[TierPage]) -> None:
        """Have pages written that have come to the host, as far as it does not give them up before their turn."""
        self._unsaved += pages
        self._save_more()

    def _save_more(self) -> None:
        while self._unsaved and self._lower.has_room:
            page = self._unsaved.popleft()
            if self._tier.holds(page) and self._lower.save(page.key, page.page):
                self._tier.pin_page(page)  # until it is written
                self._being_saved[page.page] = page

    def fetch(self, request_id: str, keys: PageKeys, first: int, last: int, rate: float, now: float) -> None:
        """Begin to load what lies below of the pages `first` to `last` of a new request, if that is sooner than to
        compute them at `rate` tokens per second (0: not known).

        Not to be called while a step is being planned, as the host pages of the step in flight are free by then.
        """
        if self._lower.is_empty:
            return
        wanted, last_coming = self._missing(keys, first, last)
        if last_coming is None:
            return
        seconds = min((last_coming + 1 - first) * self._page_size / (rate or 1e-9), _LONGEST_WAIT_S)
        if self._lower.seconds(len(wanted)) >= seconds:
            return
        for page, host in zip(wanted, hosts := self._pool.take(len(wanted)), strict=True):
            self._tier.add(keys[page], host)
        self._lower.load([(keys[page], host) for page, host in zip(wanted, hosts, strict=True)])
        self._awaited[request_id] = _Awaited(keys[last_coming], now + seconds)

    def _missing(self, keys: PageKeys, first: int, last: int) -> tuple[list[int], int | None]:
        """Return the pages to be loaded, and the last that arrives of those without a gap; None if none does."""
        wanted: list[int] = []
        last_coming = None
        for page in range(first, last):
            key = keys[page]
            if self._tier.has(key):
                if self._tier.is_arriving(key):
                    last_coming = page
                continue
            if not self._lower.has(key) or len(wanted) >= self._pool.available:
                break
            wanted.append(page)
            last_coming = page
        return wanted, last_coming

    def is_awaited(self, request_id: str, now: float) -> bool:
        """Whether a request waits for pages that are on their way. O(1)."""
        awaited = self._awaited.get(request_id)
        if awaited is None:
            return False
        if now < awaited.until and self._tier.is_arriving(awaited.last):
            return True
        del self._awaited[request_id]
        return False

    def forget(self, request_id: str) -> None:
        """Note that a request does not wait any more. Idempotent."""
        self._awaited.pop(request_id, None)

    def take_in(self) -> None:
        """Take in which transfers have ended."""
        saved, loaded, failed = self._lower.finished()
        self._tier.unpin([self._being_saved.pop(page) for page in saved][::-1])
        self._pool.free(self._tier.settle(loaded).unwanted)
        self._pool.free(self._tier.drop(failed))
        self._save_more()

    def reset(self) -> None:
        """Forget what lies below."""
        self._unsaved.clear()
        self._lower.clear()
