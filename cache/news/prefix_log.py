"""The log of blocks that an engine holds: its loop records changes, a publisher drains them at its own pace.

    tree ──store/evict──▶ changes since the last drain ──drain──▶ (stored, evicted) ──▶ subscribers with a snapshot
                                                          │
                                                          ▼
                                             held at the last drain ──snapshot──▶ a new subscriber

A snapshot is the sum of all deltas drained before it. It is read a piece at a time, the blocks used last before
others. A publisher that sends a new subscriber all pieces of a snapshot, and between them and afterwards every
delta that it drains, loses nothing, provided that one thread drains and reads snapshots.

Blocks that the tree evicts may be kept in host memory and slower tiers. They count as held. A change of tier is a
move, which is reported separately from blocks that come and go.

Prompts can be crafted whose hashes collide. At most they mislead a router: the tree itself compares tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import chain

from cache.news.block_events import BlockEvents
from cache.news.recent_runs import RecentRuns, newest_first
from cache.news.tier import Tier

_DEVICE = 1 << Tier.DEVICE


class PrefixLog:
    """Logs block hashes (cache/prefix_hash.py) that are stored and evicted. Thread-safe; one publisher drains.

    It takes about 100 bytes for each held block, and no more while it is not drained.
    """

    def __init__(self, recent: RecentRuns | None = None) -> None:
        """`recent` says which blocks were used last, if that is known."""
        self.events: BlockEvents | None = None
        """Told of every change as well, where other programs want to know."""
        self._recent = recent or RecentRuns()
        self._changes = threading.Lock()  # held during a change or a swap only: the engine loop waits for no copy
        self._stored: dict[int, None] = {}  # held now, not at the last drain; ordered: parents before children
        self._evicted: set[int] = set()  # held at the last drain, not now
        self._outside: dict[
            int, int
        ] = {}  # blocks also kept outside the tree: a bit for each tier that has it, including the tree's
        self._moved: set[int] = set()  # blocks of `_outside` whose reported tier may be out of date
        self._published = threading.Lock()
        self._held: dict[int, None] = {}  # blocks held at the last drain; ordered as above
        self._lower: dict[int, int] = {}  # block -> its reported tier, if not the device

    def store(self, hashes: Sequence[int]) -> None:
        """Record blocks that the tree holds from now on and did not before. O(len(hashes))."""
        with self._changes:
            if not self._evicted and not self._outside:
                self._stored.update(dict.fromkeys(hashes))
                return
            for block in hashes:
                if block in self._outside:
                    self._outside[block] |= _DEVICE
                    self._moved.add(block)
                elif block in self._evicted:
                    self._evicted.remove(block)
                    self._moved.add(block)
                else:
                    self._stored[block] = None

    def evict(self, hashes: Sequence[int]) -> None:
        """Record blocks that the tree held and no longer does. O(len(hashes))."""
        if self.events is not None:
            self.events.evict(hashes)
        self._forget(hashes)

    def _forget(self, hashes: Sequence[int]) -> None:
        with self._changes:
            for block in hashes:
                if block in self._outside:
                    self._outside[block] &= ~_DEVICE
                    self._moved.add(block)
                else:
                    self._gone(block)

    def keep(self, hashes: Sequence[int], tier: Tier = Tier.HOST) -> None:
        """Record blocks, of the tree or of another tier, that are kept in this one as well, until `drop`.
        O(len(hashes)).
        """
        if self.events is not None:
            self.events.keep(hashes, tier)
        with self._changes:
            for block in hashes:
                self._outside[block] = self._outside.get(block, _DEVICE) | 1 << tier
                self._moved.add(block)

    def bring(self, hashes: Sequence[int], tier: Tier = Tier.HOST) -> None:
        """Record blocks that come to this tier from elsewhere, and stay until `drop`: the tree need not have them.
        O(len(hashes)).
        """
        if self.events is not None:
            self.events.keep(hashes, tier)
        with self._changes:
            for block in hashes:
                before = self._outside.get(block)
                if before is None:
                    before = _DEVICE if self._is_held(block) else 0
                if not before:
                    self._come(block)
                self._outside[block] = before | 1 << tier
                self._moved.add(block)

    def _is_held(self, block: int) -> bool:
        return block in self._stored or (block in self._held and block not in self._evicted)

    def _come(self, block: int) -> None:
        if block in self._evicted:
            self._evicted.remove(block)
        else:
            self._stored[block] = None

    def drop(self, hashes: Sequence[int], tier: Tier = Tier.HOST) -> None:
        """Record blocks that are no longer kept in a tier outside the tree. O(len(hashes))."""
        if self.events is not None:
            self.events.drop(hashes, tier)
        with self._changes:
            for block in hashes:
                left = self._outside.pop(block, _DEVICE) & ~(1 << tier)
                if left & ~_DEVICE:
                    self._outside[block] = left
                if not left:
                    self._gone(block)
                else:
                    self._moved.add(block)

    def _gone(self, block: int) -> None:
        self._moved.discard(block)
        if block in self._stored:
            del self._stored[block]
        else:
            self._evicted.add(block)

    def drain(self) -> tuple[list[int], list[int]]:
        """Return the blocks stored and evicted since the last drain; a block that was both is in neither list.

        No stored block comes before the blocks that precede it in its prefix.
        """
        with self._published:
            with self._changes:
                stored, self._stored = self._stored, {}
                evicted, self._evicted = self._evicted, set()
            for block in evicted:
                self._lower.pop(block, None)
                self._held.pop(block, None)  # Two blocks may have one hash; the second finds nothing.
            self._held.update(stored)
            return list(stored), list(evicted)

    def drain_moves(self) -> dict[int, int]:
        """Return the blocks held at the last drain whose fastest tier is another than was told, with that tier.

        Call it after `drain`, of whose stored blocks nothing else is said if they are on the device.
        """
        with self._published:
            with self._changes:
                moved, self._moved = self._moved, {block for block in self._moved if block in self._stored}
                tiers = {block: self._outside.get(block, _DEVICE) for block in moved if block in self._held}
            moves: dict[int, int] = {}
            for block, mask in tiers.items():
                tier = (mask & -mask).bit_length() - 1
                if tier != self._lower.get(block, Tier.DEVICE):
                    moves[block] = tier
                    if tier == Tier.DEVICE:
                        del self._lower[block]
                    else:
                        self._lower[block] = tier
            return moves

    def tiers(self, hashes: Sequence[int]) -> bytes:
        """Return the tier that was told of each block, a byte each; empty where all are on the device."""
        lower = self._lower
        return bytes(lower.get(block, 0) for block in hashes) if lower else b""

    def snapshot(self) -> Iterator[int]:
        """Yield the blocks held at the last drain: those used last come first, and none before those that precede
        it in its prefix. The first step is O(blocks), 2 ms for 131,072 of them.

        What is drained meanwhile may be missing, if it was stored, and is left out, if it was evicted.
        """
        recent = newest_first(self._recent.copy())
        with self._published:
            held = list(self._held)
        told: set[int] = set()
        for block in chain(chain.from_iterable(recent), held):
            if block in self._held and block not in told:
                told.add(block)
                yield block
