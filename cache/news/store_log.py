"""The log of blocks in a store of files, which several engines may share: told once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from cache.news.prefix_log import PrefixLog
from cache.news.tier import Tier


class StoreLog(PrefixLog):
    """Logs what a store holds as `PrefixLog` does for a tree. Thread-safe.

    `events` are those of the engine's own blocks: of blocks that it has never held, it does not know the tokens.
    """

    def store(self, hashes: Sequence[int]) -> None:
        """Record blocks that are in files from now on."""
        if self.events is not None:
            self.events.keep(hashes, Tier.FILE)
        super().store(hashes)

    def evict(self, hashes: Sequence[int]) -> None:
        """Record blocks that are in files no longer."""
        if self.events is not None:
            self.events.drop(hashes, Tier.FILE)
        self._forget(hashes)
