"""Which blocks the cache holds, told as changes: what the engine loop records, a publisher drains at its own pace.

    tree ──store/evict──▶ changes since the last drain ──drain──▶ (stored, evicted) ──▶ to all who have a snapshot
                                                          │
                                                          ▼
                                             held at the last drain ──snapshot──▶ to one who is new

A snapshot is the sum of all that was drained before it. So a publisher that sends each newcomer a snapshot, and
from then on every delta it drains, loses nothing and sends nothing twice, if one thread drains and snapshots.

Somebody may craft prompts whose hashes collide. That misleads a router at most: the tree itself compares tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence


class PrefixLog:
    """Block hashes (cache/prefix_hash.py) stored and evicted. Thread-safe; one publisher drains.

    Memory: about 100 bytes for each held block, and no more while nobody drains.
    """

    def __init__(self) -> None:
        self._changes = threading.Lock()  # held for a change or a swap: the engine loop never waits for a copy
        self._stored: dict[int, None] = {}  # held now, not at the last drain; ordered: parents before children
        self._evicted: set[int] = set()  # held at the last drain, not now
        self._published = threading.Lock()
        self._held: dict[int, None] = {}  # at the last drain; ordered as above

    def store(self, hashes: Sequence[int]) -> None:
        """Blocks are held from now on; none of them was before. O(len(hashes))."""
        with self._changes:
            if not self._evicted:
                self._stored.update(dict.fromkeys(hashes))
                return
            for block in hashes:
                if block in self._evicted:
                    self._evicted.remove(block)
                else:
                    self._stored[block] = None

    def evict(self, hashes: Sequence[int]) -> None:
        """Blocks are held no more; all of them were. O(len(hashes))."""
        with self._changes:
            for block in hashes:
                if block in self._stored:
                    del self._stored[block]
                else:
                    self._evicted.add(block)

    def drain(self) -> tuple[list[int], list[int]]:
        """What was stored and what was evicted since the last drain; a block that was both is in neither.

        Stored blocks come in an order in which none comes before the blocks it follows in its prefix.
        """
        with self._published:
            with self._changes:
                stored, self._stored = self._stored, {}
                evicted, self._evicted = self._evicted, set()
            for block in evicted:
                self._held.pop(block, None)  # Of two blocks with one hash the second to go finds nothing.
            self._held.update(stored)
            return list(stored), list(evicted)

    def snapshot(self) -> list[int]:
        """All blocks held at the last drain, ordered like a delta's. O(blocks): 2 ms for 131,072."""
        with self._published:
            return list(self._held)
