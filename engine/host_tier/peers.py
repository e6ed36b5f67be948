"""Transfers of KV between engines: the pages that a source lends, and the interface of the page mover.

    source     lend ──▶ pages that stay unchanged ──▶ read and sent ──▶ give back
    receiver   load ──▶ host pages, in the prompt's order ──▶ finished: found by prompts, like all in host memory

The page mover knows connections but no caches; an engine knows no connections. Both ends count pages from a
prompt's start, and name a prompt by its namespace and tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from cache.node import Namespace
from engine.host_tier.lower_tier import NOTHING_FINISHED, Finished
from engine.values.request import KVSource


class LentPages(NamedTuple):
    """Whole pages of a prompt that stay unchanged until they are given back: `device`, then `host`."""

    number: int
    """Names the loan."""
    first: int
    """Position of the first page in the prompt."""
    device: tuple[int, ...] = ()
    host: tuple[int, ...] = ()


class PeerTotals(NamedTuple):
    """Pages fetched since the start."""

    loaded: int = 0
    """Pages."""
    failed: int = 0
    """Pages that did not arrive, or differed from the sent ones."""
    fetches: int = 0
    failed_fetches: int = 0
    """Fetches of which some page did not arrive."""


class PageRegion(NamedTuple):
    """The addresses of pages: piece i of page p has `stride` bytes from `starts[i] + p * stride` on."""

    gpu: int | None
    """Index of the GPU whose memory it is; None for the machine's own."""
    starts: tuple[int, ...]
    stride: int
    num_pages: int


class PageReading(Protocol):
    """A page that is being read."""

    def is_ready(self) -> bool:
        """Return whether all its bytes are there."""

    def take(self) -> bytes | memoryview:
        """Return its bytes once they are there."""


class PageMemory(Protocol):
    """The memory of an engine's pages. Pages of both kinds have the same bytes in the same order."""

    @property
    def identity(self) -> str:
        """Equal in engines that can use each other's pages: model, layers, shape and type of a page."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""

    def reading(self, is_device: bool, page: int) -> PageReading:
        """Begin to read a page of the device, or of the host, that stays unchanged meanwhile."""

    def on_read(self, call: Callable[[], None]) -> None:
        """Call `call`, in any thread, when a page becomes ready that was not ready when its reading began."""

    def write(self, page: int, data: memoryview) -> None:
        """Write a host page before any step that is launched from now on."""

    def regions(self) -> tuple[PageRegion, PageRegion] | None:
        """Return the addresses of the pages of the device and of the host, their pieces in the order of the bytes;
        None if they are in the memory of several processes.
        """


class KVPeers(Protocol):
    """Fetches pages from other engines while steps run. Only the engine's thread uses it."""

    def load(
        self, source: KVSource, namespace: Namespace, tokens: Sequence[int], first: int, hosts: Sequence[int]
    ) -> None:
        """Begin to fetch the pages from position `first` on of the prompt that begins with `tokens`, one into each
        of the host pages, which only the mover uses until they are finished. Each will be finished, even if the
        peer fails.
        """

    def seconds(self, source: KVSource, num_pages: int) -> float:
        """Predict the seconds until so many more have arrived; 0 until that was measured."""

    def finished(self) -> Finished:
        """Return the transfers that ended since the last call."""

    def on_finished(self, call: Callable[[], None]) -> None:
        """Call `call`, in any thread, when pages have arrived or a fetch has ended."""

    def totals(self) -> PeerTotals:
        """Count the pages fetched since the start."""

    def close(self) -> None:
        """Cancel all transfers. Idempotent."""


class NoKVPeers:
    """There is no other engine."""

    def load(
        self, source: KVSource, namespace: Namespace, tokens: Sequence[int], first: int, hosts: Sequence[int]
    ) -> None:
        """Never called, because it never pays."""
        raise AssertionError(f"{source.peer} was asked for pages, but this engine has no peers")

    def seconds(self, source: KVSource, num_pages: int) -> float:
        """Nothing ever arrives."""
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
