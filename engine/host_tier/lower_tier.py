"""What the scheduling core wants of a memory below host memory; `engine/kv_tier` has it in files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from cache.news.prefix_log import PrefixLog


class Finished(NamedTuple):
    """Host pages whose transfer is over."""

    saved: Sequence[int] = ()
    """Written, or given up: nobody reads the host page any more."""
    loaded: Sequence[int] = ()
    failed: Sequence[int] = ()
    """Could not be read: what is in the host page is not known."""


NOTHING_FINISHED = Finished()


class TierTotals(NamedTuple):
    """What was moved to and from the tier since the start, and what is in it."""

    saved: int = 0
    """Pages."""
    loaded: int = 0
    """Pages."""
    failed: int = 0
    """Pages that could not be read, or were not what was written."""
    skipped: int = 0
    """Pages that were not written, as the disk had failed."""
    page_bytes: int = 0
    """Bytes of each page."""
    held: int = 0
    """Pages that are there."""
    held_bytes: int = 0


class LowerTier(Protocol):
    """Moves pages between host memory and the tier while steps run. It is used by the engine's thread alone."""

    @property
    def is_empty(self) -> bool:
        """Whether it has no page at all."""
        ...

    @property
    def store(self) -> str:
        """Names what holds its pages; the same for all engines that share them, and "" if there is nothing."""
        ...

    @property
    def log(self) -> PrefixLog:
        """The blocks that are there, whoever has written them."""
        ...

    @property
    def page_seconds(self) -> float:
        """Seconds to load a page, measured or expected; 0 where there is nothing to load."""
        ...

    def has(self, key: bytes) -> bool:
        """Whether the page is there. O(1)."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether another page may wait to be written."""
        ...

    def save(self, key: bytes, page: int, blocks: Sequence[int]) -> bool:
        """Begin to write a host page with the blocks of those hashes, which must stay as it is until it is among
        `Finished.saved`; False if it will not be written.
        """
        ...

    def load(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Begin to read pages, in this order, into host pages that nobody else uses until they are finished."""
        ...

    def seconds(self, num_pages: int) -> float:
        """Predict how long it takes until `num_pages` more are loaded; 0 until that was measured."""
        ...

    def finished(self) -> Finished:
        """Return what is over since the last call."""
        ...

    def on_finished(self, call: Callable[[], None]) -> None:
        """Have `call` called, in any thread, when something was loaded or all was saved."""
        ...

    def clear(self) -> None:
        """Forget all pages."""
        ...

    def totals(self) -> TierTotals:
        """Return what was moved since the start."""
        ...

    def close(self) -> None:
        """Give up what is under way. Idempotent."""
        ...


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
