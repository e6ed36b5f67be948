"""KV of preempted requests in host memory: which of it lies where, and when it pays to put it there.

position   0 ................ start ................... end
device     [ others hold it    | evictable: goes when room is needed ]
host                    [ copies of the whole pages these tokens lie in ]

A preempted request's KV stays in the radix tree while there is room. What only it held is the first to go, so
that is what is copied: out in the step that takes its pages, and in again, as far as the tree lost it, in the
first step that it is part of after that.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

_SMOOTHING = 0.2

PagePair = tuple[int, int]
"""A device page and a host page, of which one is copied to the other."""

MODES: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {
        "recompute": lambda swap_seconds, recompute_seconds: False,
        "swap": lambda swap_seconds, recompute_seconds: True,
        "auto": lambda swap_seconds, recompute_seconds: swap_seconds < recompute_seconds,
    }
)
"""Whether a request is swapped out, by what either way will probably cost."""


class HostAccount(NamedTuple):
    """Every host page is free or held, so `total` is the size of the pool at all times."""

    free: int = 0
    held: int = 0
    """Pages with KV of requests that wait, or that the step just planned reads."""

    @property
    def total(self) -> int:
        """Sum of both, in pages."""
        return self.free + self.held


class HostMemory(NamedTuple):
    """What a runner has of it."""

    num_pages: int = 0
    page_seconds: float = 0.0
    """To copy one page one way, among others."""


class _SwappedRequest(NamedTuple):
    """What a preempted request left behind."""

    start: int
    """Tokens before it were held by others as well."""
    end: int
    """Tokens whose KV was computed."""
    pages: list[int]
    """Host pages of the tokens from the page on in which `start` lies; empty: it will be computed again."""


class SwapSpace:
    """Owns every host page. Belongs to the scheduler, whose steps run strictly in the order they were planned in.

    That order is what makes reuse safe: pages that a step reads are handed out again from the next plan on.
    """

    def __init__(self, memory: HostMemory, page_size: int, mode: str = "auto") -> None:
        """`page_size` in tokens; `mode` is one of `MODES`. Raises ValueError when it is not."""
        if mode not in MODES:
            raise ValueError(f"unknown preemption mode {mode!r}; known are {', '.join(sorted(MODES))}")
        self.num_pages = memory.num_pages
        self._page_size = page_size
        self._page_seconds = memory.page_seconds
        self._pays = MODES[mode]
        self._free = list(
            range(memory.num_pages)
        )  # a heap: the lowest first, so that neighbours are copied at once
        self._swapped: dict[str, _SwappedRequest] = {}
        self._being_read: list[int] = []
        self._share_lost = 1.0  # of what only a preempted request held: what was gone when it came back

    def account(self) -> HostAccount:
        """Where the host pages are. Counted apart; that they add up to `num_pages` is the invariant."""
        held = sum(len(swapped.pages) for swapped in self._swapped.values())
        return HostAccount(len(self._free), held + len(self._being_read))

    def swap_out(
        self, request_id: str, table: Sequence[int], start: int, end: int, tokens_per_second: float
    ) -> list[PagePair]:
        """A request whose page table is `table` loses its pages; only it held the tokens `start` to `end`.

        Returns the copies to the host, before anything is written to these pages; none when it will be computed
        again, at `tokens_per_second` (0: not known), because that is cheaper or the host has no room.
        No-op for a request that has not read what it left the last time.
        """
        if request_id in self._swapped:
            return []
        pages = table[start // self._page_size : -(-end // self._page_size)] if end > start else []
        swap_seconds = (1 + self._share_lost) * len(pages) * self._page_seconds
        recompute_seconds = self._share_lost * (end - start) / (tokens_per_second or 1e-9)
        if len(pages) > len(self._free) or not self._pays(swap_seconds, recompute_seconds):
            pages = []
        hosts = [heapq.heappop(self._free) for _ in pages]
        self._swapped[request_id] = _SwappedRequest(start, end, hosts)
        return list(zip(pages, hosts, strict=True))

    def reach(self, request_id: str, num_found: int) -> int:
        """Leading tokens of a request that have KV, when the device's tree still has `num_found` of them."""
        swapped = self._swapped.get(request_id)
        if swapped is None or not swapped.pages or num_found // self._page_size < swapped.start // self._page_size:
            return num_found  # A hole before what the host has: it is computed, and all behind it.
        return max(num_found, swapped.end)

    def swap_in(self, request_id: str, table: Sequence[int], num_found: int) -> list[PagePair]:
        """A request goes on in the pages of `table`, which cover all it had; the tree's hold `num_found` tokens.

        Returns the copies to the device: what `reach` promised, from the page on in which `num_found` lies. The
        host pages are free again at the next `begin_step`.
        """
        reached = self.reach(request_id, num_found)
        swapped = self._swapped.pop(request_id, None)
        if swapped is None:
            return []
        self._being_read += swapped.pages
        if swapped.end > swapped.start:
            lost = (swapped.end - max(num_found, swapped.start)) / (swapped.end - swapped.start)
            self._share_lost += _SMOOTHING * (max(lost, 0.0) - self._share_lost)
        if reached == num_found:
            return []
        first = num_found // self._page_size
        hosts = swapped.pages[first - swapped.start // self._page_size :]
        return list(zip(table[first : first + len(hosts)], hosts, strict=True))

    def forget(self, request_id: str) -> None:
        """A request has ended, or its copies are not to be trusted: its host pages are free. Idempotent."""
        swapped = self._swapped.pop(request_id, None)
        for page in [] if swapped is None else swapped.pages:
            heapq.heappush(self._free, page)

    def begin_step(self) -> None:
        """A new step is planned: it runs after the copies of all steps before it."""
        for page in self._being_read:
            heapq.heappush(self._free, page)
        self._being_read = []
