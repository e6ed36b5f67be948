"""Loads prefixes to host memory, from a lower tier and from other engines, and tracks the requests that wait for
them.

    a prompt arrives ──▶ which of its pages are below,  ──▶ loaded into host pages ──▶ its first step copies them
                         and which has its source?
                              │ computing them is sooner            │ late, or lost
                              └────────────────────────────────────▶ computed

A request waits for its pages at most as long as computing them would take, so that it never takes more than twice
the time of the faster way. It uses every page that has arrived by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cache.tiers.page_keys import PageKeys
from cache.tiers.page_tier import TierPage
from engine.host_tier.host_pool import HostPool
from engine.host_tier.lower_tier import LowerTier
from engine.host_tier.peers import NO_PEERS, KVPeers
from engine.values.request import KVSource, Request

_LONGEST_WAIT_S = 30.0
"""A tier that is slower than this has failed."""


class _Missing(NamedTuple):
    """Pages of a prompt that can be loaded."""

    in_files: list[int]
    at_peer: list[int]
    last: int | None
    """The last page to arrive, of these and of those already being loaded; None if there are none."""


class _Awaited(NamedTuple):
    """The pages that a request waits for."""

    last: bytes
    """Key of the page that arrives last."""
    until: float
    """Clock at which it stops waiting."""
    num_tokens: int
    """Leading tokens of the prompt that then have KV."""


def _has_none(key: bytes) -> bool:
    return False


class ArrivingPrefixes:
    """Writes pages of host memory to the tier below, and loads pages from it or from other engines for prompts."""

    def __init__(self, lower: LowerTier, pool: HostPool, page_size: int) -> None:
        self._lower, self._pool, self._tier = lower, pool, pool.tier
        self._page_size = page_size
        self.peers: KVPeers = NO_PEERS
        """Other engines."""
        self._num_fetching = 0
        self._awaited: dict[str, _Awaited] = {}
        self._unsaved: deque[TierPage] = deque()
        self._being_saved: dict[int, TierPage] = {}

    def save(self, pages: Iterable[TierPage]) -> None:
        """Write pages that have arrived in host memory, unless it evicts them before their turn."""
        self._unsaved += pages
        self._save_more()

    def _save_more(self) -> None:
        while self._unsaved and self._lower.has_room:
            page = self._unsaved.popleft()
            if self._tier.holds(page) and self._lower.save(page.key, page.page, page.blocks):
                self._tier.pin_page(page)  # kept until the page is written
                self._being_saved[page.page] = page

    def fetch(
        self,
        request: Request,
        keys: PageKeys,
        first: int,
        last: int,
        rate: float,
        now: float,
        blocks_in: Callable[[Sequence[int]], Sequence[Sequence[int]]],
    ) -> None:
        """Begin to load the pages `first` to `last` of a new request from files and from its source, where that is
        faster than computing them at `rate` tokens per second (0: not known).

        `blocks_in` returns the hashes of the blocks in each of some pages, all of which have KV.

        Do not call it while a step is being planned, because the host pages of the step in flight are then free.
        """
        if self._lower.is_empty and request.source is None and not self._num_fetching:
            return
        missing = self._worth_loading(request.source, keys, first, last, rate)
        if missing.last is None:
            return
        seconds = self._seconds_to_compute(missing.last + 1 - first, rate)
        num_loaded = len(missing.in_files) + len(missing.at_peer)
        if not num_loaded and self._lower.seconds(0) >= seconds:
            return  # Other requests load these pages, which will arrive too late.
        hosts = self._pool.take(num_loaded)
        coming = [*missing.in_files, *missing.at_peer]
        for page, host, blocks in zip(coming, hosts, blocks_in(coming), strict=True):
            self._tier.add(keys[page], host, blocks, is_from_device=False)
        num_files = len(missing.in_files)
        if num_files:
            self._lower.load([(keys[page], host) for page, host in zip(missing.in_files, hosts, strict=False)])
        if missing.at_peer:
            self._load_from_peer(request, missing.at_peer, hosts[num_files:])
        num_tokens = (missing.last + 1) * self._page_size
        self._awaited[request.request_id] = _Awaited(keys[missing.last], now + seconds, num_tokens)

    def _load_from_peer(self, request: Request, pages: Sequence[int], hosts: Sequence[int]) -> None:
        """Fetch each run of pages; pages that are already here may lie between the runs."""
        assert request.source is not None
        self._num_fetching += len(pages)
        begin = 0
        for end in range(1, len(pages) + 1):
            if end == len(pages) or pages[end] != pages[end - 1] + 1:
                tokens = request.tokens[: (pages[end - 1] + 1) * self._page_size]
                self.peers.load(request.source, request.namespace, tokens, pages[begin], hosts[begin:end])
                begin = end

    def _worth_loading(
        self, source: KVSource | None, keys: PageKeys, first: int, last: int, rate: float
    ) -> _Missing:
        """Return the pages that are faster to load than to compute, from the source if files are too slow."""
        stop = 0 if source is None else min(last, source.num_tokens // self._page_size)
        missing = self._missing(keys, first, last, self._lower.has, stop)
        if missing.in_files:
            assert missing.last is not None
            seconds = self._lower.seconds(len(missing.in_files))
            if seconds >= self._seconds_to_compute(missing.last + 1 - first, rate):
                missing = self._missing(keys, first, last, _has_none, stop)
        if source is not None and missing.at_peer:
            seconds = self.peers.seconds(source, len(missing.at_peer))
            if seconds >= self._seconds_to_compute(len(missing.at_peer), rate):
                has_file = self._lower.has if missing.in_files else _has_none
                missing = self._missing(keys, first, last, has_file, 0)
        return missing

    def _seconds_to_compute(self, num_pages: int, rate: float) -> float:
        return min(num_pages * self._page_size / (rate or 1e-9), _LONGEST_WAIT_S)

    def _missing(
        self, keys: PageKeys, first: int, last: int, has_file: Callable[[bytes], bool], stop: int
    ) -> _Missing:
        """Return the pages that can be loaded without a gap; those before `stop` that are in no file, from a peer.
        Only as many as fit with those that are here.
        """
        in_files: list[int] = []
        at_peer: list[int] = []
        last_coming, room = None, self._pool.available
        for page in range(first, last):
            key = keys[page]
            if self._tier.has(key):
                room -= self._tier.is_idle(key)
                if self._tier.is_arriving(key):
                    last_coming = page
                continue
            is_in_file = has_file(key)
            if len(in_files) + len(at_peer) >= room or not (is_in_file or page < stop):
                break
            (in_files if is_in_file else at_peer).append(page)
            last_coming = page
        return _Missing(in_files, at_peer, last_coming)

    def is_awaited(self, request_id: str, now: float) -> bool:
        """Whether a request waits for pages that are being loaded. O(1)."""
        awaited = self._awaited.get(request_id)
        if awaited is None:
            return False
        if now < awaited.until and self._tier.is_arriving(awaited.last):
            return True
        del self._awaited[request_id]
        return False

    @property
    def requests(self) -> set[str]:
        """The requests that wait for pages."""
        return set(self._awaited)

    def num_coming(self, request_id: str) -> int:
        """Return how many leading tokens of a request have KV once its pages arrive; 0 if it waits for none."""
        awaited = self._awaited.get(request_id)
        return 0 if awaited is None else awaited.num_tokens

    def forget(self, request_id: str) -> None:
        """Note that a request no longer waits. Idempotent."""
        self._awaited.pop(request_id, None)

    def take_in(self) -> None:
        """Record the transfers that have ended."""
        saved, loaded, failed = self._lower.finished()
        self._tier.unpin([self._being_saved.pop(page) for page in saved][::-1])
        self._pool.free(self._tier.settle(loaded).unwanted)
        self._pool.free(self._tier.drop(failed))
        if self._num_fetching:
            self._take_in_fetched()
        self._save_more()

    def _take_in_fetched(self) -> None:
        """Record the pages that peers sent, and save them below like all pages that arrive in host memory."""
        _, fetched, lost = self.peers.finished()
        self._num_fetching -= len(fetched) + len(lost)
        found, unwanted = self._tier.settle(fetched)
        self._pool.free(unwanted)
        self._pool.free(self._tier.drop(lost))
        self._unsaved += found

    def reset(self) -> None:
        """Forget the pages of the tier below."""
        self._unsaved.clear()
        self._lower.clear()
