"""The interface of a tier below host memory; `engine/kv_tier` implements it with files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from cache.news.prefix_log import PrefixLog


class Finished(NamedTuple):
    """Host pages whose transfer is over."""

    saved: Sequence[int] = ()
    """Written, or given up: the tier no longer reads the host page."""
    loaded: Sequence[int] = ()
    failed: Sequence[int] = ()
    """Could not be read: the content of the host page is unknown."""


NOTHING_FINISHED = Finished()


class TierTotals(NamedTuple):
    """Pages moved to and from the tier since the start, and pages in it."""

    saved: int = 0
    """Pages."""
    loaded: int = 0
    """Pages."""
    failed: int = 0
    """Pages that could not be read, or differed from the written ones."""
    skipped: int = 0
    """Pages that were not written, because the disk had failed."""
    page_bytes: int = 0
    """Bytes of each page."""
    held: int = 0
    """Pages that are there."""
    held_bytes: int = 0


class LowerTier(Protocol):
    """Moves pages between host memory and the tier while steps run. Only the engine's thread uses it."""

    @property
    def is_empty(self) -> bool:
        """Whether it has no page at all."""

    @property
    def store(self) -> str:
        """Name of the store of its pages: the same for all engines that share it; "" if there is none."""

    @property
    def log(self) -> PrefixLog:
        """The blocks that are there, including those that other engines wrote."""

    @property
    def page_seconds(self) -> float:
        """Seconds to load a page, measured or expected; 0 if the tier holds none."""

    def has(self, key: bytes) -> bool:
        """Whether the page is there. O(1)."""

    @property
    def has_room(self) -> bool:
        """Whether another page may wait to be written."""

    def save(self, key: bytes, page: int, blocks: Sequence[int]) -> bool:
        """Begin to write a host page, which has the blocks of those hashes. It must stay unchanged until it is in
        `Finished.saved`. Returns False if it will not be written.
        """

    def load(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Begin to read pages, in this order, into host pages that only the tier uses until they are finished."""

    def seconds(self, num_pages: int) -> float:
        """Predict the seconds until `num_pages` more are loaded; 0 until that was measured."""

    def finished(self) -> Finished:
        """Return the transfers that ended since the last call."""

    def on_finished(self, call: Callable[[], None]) -> None:
        """Call `call`, in any thread, when pages were loaded or all were saved."""

    def clear(self) -> None:
        """Forget all pages."""

    def totals(self) -> TierTotals:
        """Count the pages moved since the start."""

    def close(self) -> None:
        """Cancel all transfers. Idempotent."""


class NoLowerTier:
    """There is nothing below host memory."""

    is_empty = has_room = True
    store = ""
    page_seconds = 0.0

    def __init__(self) -> None:
        self.log = PrefixLog()

    def has(self, key: bytes) -> bool:
        """It has no page."""
        return False

    def save(self, key: bytes, page: int, blocks: Sequence[int]) -> bool:
        """Pages are given up."""
        return False

    def load(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """There is nothing to load."""
        assert not pages

    def seconds(self, num_pages: int) -> float:
        """Nothing is ever loaded."""
        return 0.0

    def finished(self) -> Finished:
        """Nothing was begun."""
        return NOTHING_FINISHED

    def on_finished(self, call: Callable[[], None]) -> None:
        """Nothing is begun."""

    def clear(self) -> None:
        """There is nothing to forget."""

    def totals(self) -> TierTotals:
        """Nothing was moved."""
        return TierTotals()

    def close(self) -> None:
        """Nothing is under way."""


NO_LOWER_TIER = NoLowerTier()
