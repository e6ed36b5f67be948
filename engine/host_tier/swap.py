"""Swap space: KV of preempted requests in host memory, and when copying it there pays.

position   0 ................ start ................... end
device     [ others hold it    | evictable when room is needed        ]
host                    [ copies of the whole pages of these tokens ]

A preempted request's KV stays in the radix tree while there is room. The part that only this request held is
evicted first, so that part is copied: out in the step that takes its pages, and back, if the tree lost it, in the
first step after its readmission. In models that need a resume point, it is copied too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from engine.host_tier.host_pool import HostAccount, HostPool
from engine.values.plan import PagePair

_SMOOTHING = 0.2

MODES: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {
        "recompute": lambda swap_seconds, recompute_seconds: False,
        "swap": lambda swap_seconds, recompute_seconds: True,
        "auto": lambda swap_seconds, recompute_seconds: swap_seconds < recompute_seconds,
    }
)
"""Whether a request is swapped out, given the expected costs of swapping and recomputing."""


class _SwappedRequest(NamedTuple):
    """The KV of a preempted request."""

    start: int
    """Other requests also held the tokens before it."""
    end: int
    """Tokens whose KV was computed."""
    pages: list[int]
    """Host pages of its tokens, from the page that contains `start`; empty if they will be computed again."""
    at_end: list[int]
    """Host pages of the resume point after its last token."""


class SwapSpace:
    """Owns the host memory of preempted requests. Takes pages from a pool and returns them."""

    def __init__(self, pool: HostPool, page_size: int, mode: str = "auto") -> None:
        """`page_size` in tokens; `mode` is one of `MODES`. Raises ValueError when it is not."""
        if mode not in MODES:
            raise ValueError(f"unknown preemption mode {mode!r}; known are {', '.join(sorted(MODES))}")
        self.pool = pool
        """The pool of its pages."""
        self._page_size = page_size
        self._pays = MODES[mode]
        self._swapped: dict[str, _SwappedRequest] = {}
        self._share_lost = 1.0  # moving average: share of such KV that the tree had lost at readmission

    @property
    def requests(self) -> set[str]:
        """The requests whose KV is here."""
        return set(self._swapped)

    def account(self) -> HostAccount:
        """Count the pool's pages by state; the invariant is that they add up to its `num_pages`."""
        held = sum(len(swapped.pages) + len(swapped.at_end) for swapped in self._swapped.values())
        tier = self.pool.tier
        return HostAccount(
            self.pool.num_free,
            held + self.pool.num_being_read,
            tier.num_pages - tier.num_arriving - tier.num_lent,
            tier.num_arriving,
            tier.num_lent,
        )

    def swap_out(
        self,
        request_id: str,
        table: Sequence[int],
        start: int,
        end: int,
        tokens_per_second: float,
        num_at_end: int = 0,
    ) -> list[PagePair]:
        """Record that a request loses its pages, which `table` lists; only it held the tokens `start` to `end`. It
        needs `num_at_end` more host pages, those of `at_end`, for its resume point.

        Returns the copies to the host, to be made before these pages are written to; none if the host has no room
        or recomputing, at `tokens_per_second` (0: not known), is cheaper. Does nothing for a request that has not
        read back its earlier copies.
        """
        if request_id in self._swapped:
            return []
        pages = table[start // self._page_size : -(-end // self._page_size)] if end > start else []
        num_pages = len(pages) + num_at_end
        swap_seconds = (1 + self._share_lost) * num_pages * self.pool.page_seconds
        recompute_seconds = self._share_lost * (end - start) / (tokens_per_second or 1e-9)
        if num_pages > self.pool.available or not self._pays(swap_seconds, recompute_seconds):
            pages, num_at_end = [], 0
        hosts, at_end = self.pool.take(len(pages)), self.pool.take(num_at_end)
        self._swapped[request_id] = _SwappedRequest(start, end, hosts, at_end)
        return list(zip(pages, hosts, strict=True))

    def holds(self, request_id: str) -> bool:
        """Whether a request was preempted and has not started again."""
        return request_id in self._swapped

    def at_end(self, request_id: str) -> list[int]:
        """Return the host pages of a request's resume point, after its last swapped-out token."""
        swapped = self._swapped.get(request_id)
        return [] if swapped is None else swapped.at_end

    def end(self, request_id: str, num_found: int) -> int:
        """Return after how many leading tokens a request can resume from its swapped-out pages, given that the
        device's tree has KV of `num_found`; 0: it cannot.
        """
        swapped = self._swapped.get(request_id)
        if swapped is None or not (swapped.pages or swapped.at_end):
            return 0
        if num_found // self._page_size < swapped.start // self._page_size:
            return 0  # There is a gap before the host's pages: all tokens from the gap on are computed.
        return swapped.end if swapped.pages or num_found >= swapped.end else 0

    def reach(self, request_id: str, num_found: int) -> int:
        """Return how many leading tokens of a request have KV, given that the device's tree has `num_found`."""
        return max(num_found, self.end(request_id, num_found))

    def swap_in(
        self, request_id: str, table: Sequence[int], num_found: int, *, has_end: bool = True
    ) -> list[PagePair]:
        """Record that a request continues in the pages of `table`; the tree had KV of `num_found` tokens, and with
        `has_end` also a resume point there.

        Returns the copies to the device of the pages that `reach` promised, from the page that contains
        `num_found`. The host pages are free again at the pool's next `begin_step`.
        """
        reached = self.reach(request_id, num_found)
        swapped = self._swapped.pop(request_id, None)
        if swapped is None:
            return []
        self.pool.free_after_reading([*swapped.pages, *swapped.at_end])
        if swapped.end > swapped.start:
            kept = max(num_found if has_end else 0, swapped.start)
            lost = (swapped.end - kept) / (swapped.end - swapped.start)
            self._share_lost += _SMOOTHING * (max(lost, 0.0) - self._share_lost)
        if reached == num_found:
            return []
        first = num_found // self._page_size
        hosts = swapped.pages[first - swapped.start // self._page_size :]
        return list(zip(table[first : first + len(hosts)], hosts, strict=True))

    def forget(self, request_id: str) -> None:
        """Free the host pages of a request that has ended or whose copies may be invalid. Idempotent."""
        swapped = self._swapped.pop(request_id, None)
        self.pool.free([] if swapped is None else [*swapped.pages, *swapped.at_end])
