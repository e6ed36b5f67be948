"""KV that goes from one engine to another: what a source lends, and what a receiver wants of who moves it.

    source     lend ──▶ pages that stay as they are ──▶ read and sent ──▶ give back
    receiver   load ──▶ host pages, in the prompt's order ──▶ finished: found by prompts, as all in host memory

Who moves pages knows connections and nothing of caches; an engine knows no connections. Both ends count pages from
a prompt's start, and name a prompt by its namespace and tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from cache.node import Namespace
from engine.host_tier.lower_tier import NOTHING_FINISHED, Finished
from engine.values.request import KVSource


class LentPages(NamedTuple):
    """Whole pages of a prompt that stay as they are until they are given back: `device`, then `host`."""

    number: int
    """Names the loan."""
    first: int
    """Position of the first page in the prompt."""
    device: tuple[int, ...] = ()
    host: tuple[int, ...] = ()


class PeerTotals(NamedTuple):
    """What was fetched since the start."""

    loaded: int = 0
    """Pages."""
    failed: int = 0
    """Pages that did not come, or were not what was sent."""
    fetches: int = 0
    failed_fetches: int = 0
    """Fetches of which not every page came."""


class PageRegion(NamedTuple):
    """Where pages of one kind lie: piece i of page p has `stride` bytes from `starts[i] + p * stride` on."""

    gpu: int | None
    """Index of the GPU whose memory it is; None for the machine's own."""
    starts: tuple[int, ...]
    stride: int
    num_pages: int


class PageReading(Protocol):
    """A page that is being read."""

    def is_ready(self) -> bool:
        """Return whether all its bytes are there."""
        ...

    def take(self) -> bytes | memoryview:
        """Return its bytes once they are there."""
        ...


class PageMemory(Protocol):
    """The memory of an engine's pages. Pages of both kinds have the same bytes in the same order."""

    @property
    def identity(self) -> str:
        """What engines must have in common to use each other's pages: model, layers, shape and type of a page."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        ...

    def reading(self, is_device: bool, page: int) -> PageReading:
        """Begin to read a page of the device, or of the host, that stays as it is meanwhile."""
        ...

    def on_read(self, call: Callable[[], None]) -> None:
        """Have `call` called, in any thread, when a page is ready that was not when its reading began."""
        ...

    def write(self, page: int, data: memoryview) -> None:
        """Write a host page, before any step that is sent to the device from now on."""
        ...

    def regions(self) -> tuple[PageRegion, PageRegion] | None:
        """Return where the pages of the device and of the host lie, their pieces in the order of the bytes; None
        where they lie in the memory of several processes.
        """
        ...


class KVPeers(Protocol):
    """Fetches pages from other engines while steps run. It is used by the engine's thread alone."""

    def load(
        self, source: KVSource, namespace: Namespace, tokens: Sequence[int], first: int, hosts: Sequence[int]
    ) -> None:
        """Begin to fetch the pages from position `first` on of the prompt that begins with `tokens`, one into each
        of the host pages, which nobody else uses until they are finished. Each of them is finished in the end,
        whatever becomes of the peer.
        """
        ...

    def seconds(self, source: KVSource, num_pages: int) -> float:
        """Predict how long it takes until so many more are there; 0 until that was measured."""
        ...

    def finished(self) -> Finished:
        """Return what is over since the last call."""
        ...

    def on_finished(self, call: Callable[[], None]) -> None:
        """Have `call` called, in any thread, when pages have come or a fetch has ended."""
        ...

    def totals(self) -> PeerTotals:
        """Return what was fetched since the start."""
        ...

    def close(self) -> None:
        """Give up what is under way. Idempotent."""
        ...


class NoKVPeers:
    """There is no other engine."""

    def load(
        self, source: KVSource, namespace: Namespace, tokens: Sequence[int], first: int, hosts: Sequence[int]
    ) -> None:
        """Never called, as it never pays."""
        raise AssertionError(f"{source.peer} cannot be asked for anything")

    def seconds(self, source: KVSource, num_pages: int) -> float:
        """Nothing ever comes."""
        return math.inf

    def finished(self) -> Finished:
        """Nothing was begun."""
        return NOTHING_FINISHED

    def on_finished(self, call: Callable[[], None]) -> None:
        """Nothing is begun."""

    def totals(self) -> PeerTotals:
        """Nothing was fetched."""
        return PeerTotals()

    def close(self) -> None:
        """Nothing is under way."""


NO_PEERS = NoKVPeers()
