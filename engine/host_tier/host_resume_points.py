"""Resume points in host memory, kept at the ends of prefixes: recurrent states, or pages of windows.

    pages of the prefix   [ page | page | page | pa.. ]
    HostStates                                  └ anywhere: the state, cut in pages, and the begun page
    HostTails                    [ row  | row  ]  at a page's end: the rows of the window before it

Both use the same host pages as KV, so no memory is reserved for them. A prefix in host memory is of use up to its
deepest resume point.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

from cache import KVCacheManager, Lease, LeaseState
from cache.node import Node
from cache.radix_tree import page_of
from cache.resume.windows import WindowTails
from cache.tiers.page_keys import PageKeys, key_at_end, key_inside
from engine.host_tier.host_pool import Copies, HostPool
from engine.values.plan import StateCopy


class HostResumePoint(NamedTuple):
    """A position from which a prompt can resume by host memory."""

    num_tokens: int
    """Leading tokens of the prompt before it."""
    keys: Sequence[bytes]
    """The tier's keys of the pages that it needs."""


class HostResumePoints(Protocol):
    """The interface of both kinds. They decide which copies are made; the caller owns the host pages."""

    def reaches(self, lease: Lease, num_computed: int) -> int:
        """Return after how many tokens a preempted request can resume from its lease; 0: it cannot."""

    def num_pages(self, lease: Lease, num_tokens: int) -> int:
        """Return how many host pages `save` fills."""

    def save(self, lease: Lease, num_tokens: int, hosts: Sequence[int]) -> Copies:
        """Return the copies to the host of a lease's resume point after so many tokens."""

    def restore(self, lease: Lease, num_tokens: int, hosts: Sequence[int]) -> Copies:
        """Return the copies from the host for a lease that awaits a resume point, saved or kept for a prefix."""

    def first_key(self, end: int) -> int:
        """Return the first page whose key `keep` needs for a node with this end."""

    def keep(self, node: Node, keys: PageKeys, tokens: Sequence[int]) -> Copies:
        """Take host pages for a node's resume point, unless it is already there; return the copies.
        `tokens` are all up to its end, `keys` those of their pages.
        """

    def deepest(self, keys: PageKeys, tokens: Sequence[int], after: int, reached: int) -> HostResumePoint | None:
        """Return the deepest resume point after `after`, given that host memory or the device has all pages before
        the one that contains `reached`. At least one of `tokens` comes after it.
        """


def host_resume_points(cache: KVCacheManager, pool: HostPool) -> HostResumePoints | None:
    """Return the kind of resume points that a model needs; None if it needs none."""
    if cache.snapshots is not None:
        return HostStates(pool, cache.page_size)
    return None if cache.tails is None else HostTails(pool, cache.tails)


class HostStates:
    """Recurrent states. Each takes `HostMemory.state_pages` pages, and one more if it belongs inside a page."""

    def __init__(self, pool: HostPool, page_size: int) -> None:
        self._pool, self._tier, self._page_size = pool, pool.tier, page_size
        self._begun: dict[bytes, dict[tuple[int, ...], None]] = {}
        """For the key of a page: the tokens after that page at whose ends states were kept."""
        self._num_begun = 0

    def reaches(self, lease: Lease, num_computed: int) -> int:
        """Implement `HostResumePoints`: fewer than are computed, if draft tokens were accepted."""
        state = lease.state
        assert isinstance(state, LeaseState)
        return 0 if state.slot is None else min(state.end, num_computed)

    def num_pages(self, lease: Lease, num_tokens: int) -> int:
        """Implement `HostResumePoints`."""
        return self._pool.state_pages

    def save(self, lease: Lease, num_tokens: int, hosts: Sequence[int]) -> Copies:
        """Implement `HostResumePoints`."""
        state = lease.state
        assert isinstance(state, LeaseState) and state.slot is not None and state.end == num_tokens
        return Copies([], [StateCopy(state.slot, tuple(hosts))])

    def restore(self, lease: Lease, num_tokens: int, hosts: Sequence[int]) -> Copies:
        """Implement `HostResumePoints`. The device may have the begun page itself."""
        state, size = lease.state, self._pool.state_pages
        assert isinstance(state, LeaseState)
        begun = [(lease.pages[num_tokens // self._page_size], host) for host in hosts[size:]]
        if lease.num_cached == num_tokens:
            begun = []
        return Copies(begun, [StateCopy(state.awaited_slot, tuple(hosts[:size]))])

    def first_key(self, end: int) -> int:
        """Implement `HostResumePoints`."""
        return max(0, end // self._page_size - 1)

    def keep(self, node: Node, keys: PageKeys, tokens: Sequence[int]) -> Copies:
        """Implement `HostResumePoints`."""
        border, copies = node.end // self._page_size, Copies([], [])
        before, begun = keys.before(border), tuple(tokens[border * self._page_size :])
        key = key_at_end(key_inside(before, begun), 0)
        size = self._pool.state_pages + bool(begun)
        if self._tier.has(key) or size > self._pool.available:
            return copies
        assert node.resume_point is not None
        first, *more = self._pool.take(size)
        self._tier.add(key, first, further=more)
        self._note(before, begun)
        copies.states.append(StateCopy(node.resume_point, (first, *more)[: self._pool.state_pages]))
        if begun:
            copies.pages.append((page_of(node, border), more[-1]))
        return copies

    def _note(self, before: bytes, begun: tuple[int, ...]) -> None:
        self._begun.setdefault(before, {})[begun] = None
        self._num_begun += 1
        if self._num_begun > 2 * self._pool.num_pages:  # There are fewer states than pages, so most are gone.
            for place, kept in list(self._begun.items()):
                keys = {begun: key_at_end(key_inside(place, begun), 0) for begun in kept}
                self._begun[place] = {
                    begun: None
                    for begun, key in keys.items()
                    if self._tier.is_found(key) or self._tier.is_arriving(key)
                }
            self._begun = {place: kept for place, kept in self._begun.items() if kept}
            self._num_begun = sum(map(len, self._begun.values()))

    def deepest(self, keys: PageKeys, tokens: Sequence[int], after: int, reached: int) -> HostResumePoint | None:
        """Implement `HostResumePoints`."""
        if not self._begun:
            return None
        size = self._page_size
        for border in range(min(reached, len(tokens) - 1) // size, after // size - 1, -1):
            before, start = keys.before(border), border * size
            for begun in sorted(self._begun.get(before, ()), key=len, reverse=True):
                end = start + len(begun)
                if after < end < len(tokens) and tuple(tokens[start:end]) == begun:
                    key = key_at_end(key_inside(before, begun), 0)
                    if self._tier.is_found(key):
                        return HostResumePoint(end, [key])
        return None


class HostTails:
    """Pages of layers with a window. Tails share their rows, as they do on the device."""

    def __init__(self, pool: HostPool, tails: WindowTails) -> None:
        self._pool, self._tier, self._tails = pool, pool.tier, tails
        self._window, self._page_size = tails.window, tails.page_size

    def reaches(self, lease: Lease, num_computed: int) -> int:
        """Implement `HostResumePoints`."""
        assert lease.window is not None
        return 0 if lease.window.is_awaited else num_computed

    def num_pages(self, lease: Lease, num_tokens: int) -> int:
        """Implement `HostResumePoints`."""
        assert lease.window is not None
        return len(lease.window.rows_before(num_tokens)) * self._window.num_groups

    def save(self, lease: Lease, num_tokens: int, hosts: Sequence[int]) -> Copies:
        """Implement `HostResumePoints`."""
        assert lease.window is not None
        rows = lease.window.rows_before(num_tokens)
        return Copies(list(zip(chain.from_iterable(rows), hosts, strict=True)), [])

    restore = save

    def first_key(self, end: int) -> int:
        """Implement `HostResumePoints`."""
        return self._window.first_needed(end, self._page_size)

    def keep(self, node: Node, keys: PageKeys, tokens: Sequence[int]) -> Copies:
        """Implement `HostResumePoints`."""
        copies, slots = Copies([], []), self._slots(node.end)
        for slot, row in reversed(list(zip(slots, self._tails.rows_at(node), strict=True))):
            key = key_at_end(keys[slot], 0)
            if not self._tier.has(key) and len(row) <= self._pool.available:
                first, *more = self._pool.take(len(row))
                self._tier.add(key, first, further=more)
                copies.pages.extend(zip(row, (first, *more), strict=True))
        return copies

    def deepest(self, keys: PageKeys, tokens: Sequence[int], after: int, reached: int) -> HostResumePoint | None:
        """Implement `HostResumePoints`."""
        size = self._page_size
        border = min(reached, len(tokens) - 1) // size
        while border * size > after:
            needed = [key_at_end(keys[slot], 0) for slot in self._slots(border * size)]
            lacking = next((index for index, key in enumerate(needed) if not self._tier.is_found(key)), None)
            if lacking is None:
                return HostResumePoint(border * size, needed)
            border -= len(needed) - lacking  # All earlier ends need the missing row.
        return None

    def _slots(self, end: int) -> range:
        return range(self._window.first_needed(end, self._page_size), end // self._page_size)
