"""A tier of files: the blocks whose KV has been written, of which the least recently used are given up first.

It stores the blocks that the host stores, once they are written. It is one replica's own, or a store of the whole
fleet.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache import Namespace
from cache.news.prefix_log import PrefixLog
from cache.news.tier import Tier
from cache.tiers.page_keys import PageKeys
from cache.tiers.page_tier import PageTier, TierPage

_NOWHERE = Namespace("files")


class FileTier:
    """The engine's PageTier over blocks that are known by their hashes."""

    def __init__(self, num_pages: int) -> None:
        """`num_pages`: number of blocks that fit."""
        self._news = _Changes()
        self._tier = PageTier(self._news)
        self._free = list(range(num_pages))
        self._hash_of: dict[int, int] = {}

    def begin_write(self, hashes: Sequence[int]) -> list[int]:
        """Return the places of the blocks that are not here yet, as many as fit."""
        places = []
        for block in hashes:
            if self._tier.has(_name(block)):
                continue
            self._free += [] if self._free else self._tier.reclaim()
            if not self._free:
                break  # all others are being written or read
            place = self._free.pop()
            self._tier.add(_name(block), place, (block,))
            self._hash_of[place] = block
            places.append(place)
        return places

    def end_write(self, places: Sequence[int], arrived: bool) -> None:
        """Note that blocks can be found from now on; or that they never will be."""
        if arrived:
            self._tier.settle(places)
            self._news.stored += [self._hash_of[place] for place in places]
        else:
            self._free += self._tier.drop(places)

    def count(self, chain: Sequence[int], first: int, stop: int) -> int:
        """Count the blocks of a prompt, from `first` on and before `stop`, that are here without a gap."""
        return self._tier.count(_Chain(chain), first, stop)

    def pin(self, chain: Sequence[int], first: int, stop: int) -> list[TierPage]:
        """Keep blocks that `count` has found until `unpin`."""
        return self._tier.pin(_Chain(chain), first, stop)

    def unpin(self, pages: Sequence[TierPage]) -> None:
        """Undo one `pin`."""
        self._tier.unpin(pages)

    def drain_news(self) -> tuple[list[int], list[int]]:
        """Return the blocks written and given up since the last call."""
        news = self._news.stored, self._news.evicted
        self._news.stored, self._news.evicted = [], []
        return news


def _name(block: int) -> bytes:
    return block.to_bytes(8, "little")


class _Chain(PageKeys):
    """A prompt's block hashes as names of pages. They may collide, which is harmless in a simulation."""

    def __init__(self, chain: Sequence[int]) -> None:
        super().__init__(_NOWHERE, (), 1)
        self._chain = chain

    def __getitem__(self, page: int) -> bytes:
        return _name(self._chain[page])


class _Changes(PrefixLog):
    """Blocks written and given up; this log has no other holder of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[int] = []
        self.evicted: list[int] = []

    def keep(self, hashes: Sequence[int], tier: Tier = Tier.FILE) -> None:
        """Ignore blocks that are still being written."""

    def drop(self, hashes: Sequence[int], tier: Tier = Tier.FILE) -> None:
        """Record blocks that are given up, or were never written."""
        self.evicted += hashes
