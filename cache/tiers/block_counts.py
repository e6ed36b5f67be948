"""How many pages of a tier each block lies in: prompts that part inside a page leave it to several pages.

tokens     0 .. 4 .. 8 .. 12 .. 16        pages of 8 tokens, blocks of 4
prompt 1   [ a   b ] [ c    d ]
prompt 2   [ a   b ] [ c    e ]           two pages with block c
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class BlockCounts:
    """Counts the pages with each block. Not thread-safe."""

    def __init__(self) -> None:
        self._num_pages = Counter[int]()

    def add(self, blocks: Sequence[int]) -> list[int]:
        """Count a page with these blocks; return those that were in none before. O(len(blocks))."""
        fresh = [block for block in blocks if block not in self._num_pages]
        self._num_pages.update(blocks)
        return fresh

    def remove(self, blocks: Sequence[int]) -> list[int]:
        """Count one page less; return those of its blocks that are in none any more. O(len(blocks))."""
        gone = []
        for block in blocks:
            self._num_pages[block] -= 1
            if not self._num_pages[block]:
                del self._num_pages[block]
                gone.append(block)
        return gone
