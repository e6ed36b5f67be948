"""Pages of prefixes in a larger and slower memory than the radix tree's: by key, the least recently used go first.

    arriving ──settle──▶ idle ──pin──▶ pinned
       └─drop             └─ reclaim    └──unpin──▶ idle

A page can be found once its KV has arrived, and stays where it is while a request, or an engine that
borrows it, reads it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from cache.news.prefix_log import PrefixLog
from cache.tiers.block_counts import BlockCounts
from cache.tiers.page_keys import PageKeys


class TierPage:
    """A page of the tier."""

    __slots__ = ("blocks", "further", "is_wanted", "key", "number", "page", "pins")

    def __init__(self, number: int, key: bytes, page: int, blocks: Sequence[int], further: Sequence[int]) -> None:
        self.number = number
        """How many were added before it."""
        self.key = key
        self.page = page
        """Its id in the memory of the tier."""
        self.further = further
        """Ids of further pages with what takes more than one."""
        self.pins = 0
        """Readers that rely on it."""
        self.blocks = blocks
        """Hashes of the blocks in it, for the log."""
        self.is_wanted = True
        """False if it was forgotten while it arrived."""

    @property
    def pages(self) -> list[int]:
        """All its ids."""
        return [self.page, *self.further]


class Settled(NamedTuple):
    """Pages whose KV has arrived."""

    found: list[TierPage]
    unwanted: list[int]
    """Ids of those that were forgotten meanwhile, which are free now."""


class PageTier:
    """Knows which key's KV lies in which page. Not thread-safe; the caller owns the memory and copies."""

    def __init__(self, log: PrefixLog | None = None) -> None:
        """`log` is told which blocks are here."""
        self._log, self._counts = log or PrefixLog(), BlockCounts()
        self._found: dict[bytes, TierPage] = {}
        self._arriving: dict[int, TierPage] = {}
        self._arriving_keys: set[bytes] = set()
        self._idle: OrderedDict[bytes, TierPage] = OrderedDict()  # the least recently used first
        self._num_added = 0
        self._num_further = self._num_further_idle = self._num_further_arriving = (
            0  # pages besides the first of each key
        )
        self._loans = Counter[TierPage]()

    @property
    def num_arriving(self) -> int:
        """Pages whose KV is on its way."""
        return len(self._arriving) + self._num_further_arriving

    @property
    def num_lent(self) -> int:
        """Pages that are lent, including those that requests read."""
        return len(self._loans)

    @property
    def num_pages(self) -> int:
        """Pages that hold, or are about to hold, a prefix."""
        return len(self._found) + len(self._arriving) + self._num_further

    @property
    def num_idle(self) -> int:
        """Pages that `reclaim` can return."""
        return len(self._idle) + self._num_further_idle

    @property
    def wanted(self) -> list[TierPage]:
        """The pages that are found, and those that will be. O(their number)."""
        return [*self._found.values(), *(page for page in self._arriving.values() if page.is_wanted)]

    def is_found(self, key: bytes) -> bool:
        """Whether the key's KV is here."""
        return key in self._found

    def has(self, key: bytes) -> bool:
        """Whether the key's KV is here or arriving. Counts as a use."""
        if key in self._idle:
            self._idle.move_to_end(key)
        return key in self._found or key in self._arriving_keys

    def is_idle(self, key: bytes) -> bool:
        """Whether the key's KV is here and `reclaim` may give its page to others."""
        return key in self._idle

    def holds(self, page: TierPage) -> bool:
        """Whether a page is still found here."""
        return self._found.get(page.key) is page

    def is_arriving(self, key: bytes) -> bool:
        """Whether the key's KV is arriving."""
        return key in self._arriving_keys

    def add(
        self,
        key: bytes,
        page: int,
        blocks: Sequence[int] = (),
        *,
        further: Sequence[int] = (),
        is_from_device: bool = True,
    ) -> None:
        """Note that the key's KV is being copied to a page and the `further` ones. `blocks`: the hashes of its
        blocks. `is_from_device`: whether it comes from the tree's pages. The key must have no page yet.
        """
        assert key not in self._found and key not in self._arriving_keys
        self._arriving[page] = TierPage(self._num_added, key, page, blocks, further)
        self._num_added += 1
        self._num_further += len(further)
        self._num_further_arriving += len(further)
        self._arriving_keys.add(key)
        self._counts.add(blocks)
        (self._log.keep if is_from_device else self._log.bring)(blocks)

    def describe(self, key: bytes, blocks: Sequence[int]) -> None:
        """Note which blocks are in a page whose KV is here, if that was not known; and that they are here, to who
        did not know these blocks as they came.
        """
        page = self._found.get(key)
        if page is not None:
            if not page.blocks:
                page.blocks = blocks
                self._counts.add(blocks)
            self._log.keep(page.blocks)

    def settle(self, pages: Iterable[int]) -> Settled:
        """Note that KV has arrived, which is found from now on; what was added first counts as used first. Ignores
        pages in which none was arriving.
        """
        settled = Settled([], [])
        there = [arrived for page in pages if (arrived := self._arriving.pop(page, None)) is not None]
        for arrived in sorted(there, key=attrgetter("number")):
            self._num_further_arriving -= len(arrived.further)
            if arrived.is_wanted:
                self._arriving_keys.remove(arrived.key)
                self._found[arrived.key] = arrived
                self._rest(arrived)
                settled.found.append(arrived)
            else:
                self._num_further -= len(arrived.further)
                settled.unwanted.extend(arrived.pages)
        return settled

    def drop(self, pages: Iterable[int]) -> list[int]:
        """Note that KV has not arrived; return the pages that are free now."""
        dropped = [self._arriving.pop(page) for page in list(pages) if page in self._arriving]
        for page in dropped:
            self._num_further -= len(page.further)
            self._num_further_arriving -= len(page.further)
            self._forget_arriving(page)
        return [number for page in dropped for number in page.pages]

    def count(self, keys: PageKeys | Sequence[bytes], first: int, stop: int) -> int:
        """Count the pages from `first` on, before `stop`, that are found without a gap. O(result)."""
        if not self._found:
            return 0
        return next((page - first for page in range(first, stop) if keys[page] not in self._found), stop - first)

    def pin(self, keys: PageKeys | Sequence[bytes], first: int, stop: int) -> list[TierPage]:
        """Keep the pages `first` to `stop`, all of which are found, where they are until `unpin`."""
        pinned = [self._found[keys[page]] for page in range(first, stop)]
        for page in pinned:
            self.pin_page(page)
        return pinned

    def pin_page(self, page: TierPage) -> None:
        """Keep a page that is found where it is until `unpin`."""
        page.pins += 1
        if self._idle.pop(page.key, None) is not None:
            self._num_further_idle -= len(page.further)

    def unpin(self, pages: Iterable[TierPage]) -> None:
        """Undo one `pin`, which counts as a use: a prefix's first page as the last, so that its end goes first."""
        for page in reversed(list(pages)):
            page.pins -= 1
            if not page.pins:
                self._rest(page)

    def lend(self, keys: PageKeys, first: int, stop: int) -> list[TierPage]:
        """Keep the pages `first` to `stop`, all of which are found, where they are until `take_back`."""
        lent = self.pin(keys, first, stop)
        self._loans.update(lent)
        return lent

    def take_back(self, pages: Sequence[TierPage]) -> None:
        """Undo one `lend`."""
        for page in pages:
            self._loans[page] -= 1
            if not self._loans[page]:
                del self._loans[page]
        self.unpin(pages)

    def reclaim(self) -> list[int]:
        """Forget the page that was not used for the longest time and return it, with those that belong to it; none
        if all are in use. O(result).
        """
        if not self._idle:
            return []
        _, page = self._idle.popitem(last=False)
        self._num_further_idle -= len(page.further)
        self._forget(page)
        return page.pages

    def clear(self) -> list[int]:
        """Forget all pages that are not in use, and return them. Those that arrive are returned by `settle`."""
        for page in self._arriving.values():
            self._forget_arriving(page)
        idle = list(self._idle.values())
        self._idle.clear()
        self._num_further_idle = 0
        for page in idle:
            self._forget(page)
        return [number for page in idle for number in page.pages]

    def _rest(self, page: TierPage) -> None:
        self._idle[page.key] = page
        self._num_further_idle += len(page.further)

    def _forget(self, page: TierPage) -> None:
        del self._found[page.key]
        self._num_further -= len(page.further)
        self._log.drop(self._counts.remove(page.blocks))

    def _forget_arriving(self, page: TierPage) -> None:
        if page.is_wanted:
            page.is_wanted = False
            self._arriving_keys.remove(page.key)
            self._log.drop(self._counts.remove(page.blocks))
