"""KV of preempted requests in host memory: where it lies, and when copying it there pays off.

position   0 ................ start ................... end
device     [ others hold it    | evictable when room is needed        ]
host                    [ copies of the whole pages of these tokens ]

A preempted request's KV stays in the radix tree while there is room. The part that only this request held is
evicted first, so that part is copied: out in the step that takes its pages, and back, as far as the tree lost it,
in the first step after its readmission. With it goes what has to be after it to go on, in models that need more.
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
"""Whether a request is swapped out, given what swapping and recomputing will probably cost."""


class _SwappedRequest(NamedTuple):
    """The KV that a preempted request had."""

    start: int
    """Tokens before it were also held by others."""
    end: int
    """Tokens whose KV was computed."""
    pages: list[int]
    """Host pages of its tokens, from the page in which `start` lies; empty if they will be computed again."""
    at_end: list[int]
    """Host pages of what it needs after its last token to go on."""


class SwapSpace:
    """Knows what lies in host memory for preempted requests. Takes pages from a pool and gives them back."""

    def __init__(self, pool: HostPool, page_size: int, mode: str = "auto") -> None:
        """`page_size` in tokens; `mode` is one of `MODES`. Raises ValueError when it is not."""
        if mode not in MODES:
            raise ValueError(f"unknown preemption mode {mode!r}; known are {', '.join(sorted(MODES))}")
        self.pool = pool
        """Where its pages come from."""
        self._page_size = page_size
        self._pays = MODES[mode]
        self._swapped: dict[str, _SwappedRequest] = {}
        self._share_lost = 1.0  # moving average of the share of such KV that the tree had lost at readmission

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
        """Note that a request loses its pages, which `table` lists; only it held the tokens `start` to `end`. It
        needs `num_at_end` more host pages, which are `at_end`'s, for what is to be after them.

        Returns the copies to the host, to be made before these pages are written to; none if the host has no room
        or recomputing, at `tokens_per_second` (0: not known), is cheaper. Does nothing for a request that has not
        read back what was copied for it before.
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
        """Whether a request was preempted that has not started again."""
        return request_id in self._swapped

    def at_end(self, request_id: str) -> list[int]:
        """Return the host pages of what a request needs after its last token that was swapped out."""
        swapped = self._swapped.get(request_id)
        return [] if swapped is None else swapped.at_end

    def end(self, request_id: str, num_found: int) -> int:
        """Return after how many leading tokens a request can go on by what was swapped out, given that the
        device's tree has KV of `num_found`; 0: it cannot.
        """
        swapped = self._swapped.get(request_id)
        if swapped is None or not (swapped.pages or swapped.at_end):
            return 0
        if num_found // self._page_size < swapped.start // self._page_size:
            return 0  # There is a gap before what the host has: all tokens from the gap on are computed.
        return swapped.end if swapped.pages or num_found >= swapped.end else 0

    def reach(self, request_id: str, num_found: int) -> int:
        """Return how many leading tokens of a request have KV, given that the device's tree has `num_found`."""
        return max(num_found, self.end(request_id, num_found))

    def swap_in(
        self, request_id: str, table: Sequence[int], num_found: int, *, has_end: bool = True
    ) -> list[PagePair]:
        """Note that a request continues in the pages of `table`; the tree had KV of `num_found` tokens, and unless
        `has_end`, nothing to go on from there.

        Returns the copies to the device: what `reach` promised, from the page in which `num_found` lies. The host
        pages are free again at the pool's next `begin_step`.
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
