"""The page ids of one KV memory: who takes one gets any that is free, in O(1)."""

from __future__ import annotations

from collections.abc import Iterable


class OutOfPages(Exception):
    """More pages were asked for than are free or can be evicted. Nothing was changed."""


class PagePool:
    """Hands out page ids 0 .. num_pages - 1. The page freed last goes out first: it is likely still warm."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_taken = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds. O(1)."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, all or none. O(count). Raises OutOfPages when fewer are free."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_taken[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. O(1) each. Raises ValueError for a page that is not taken: somebody freed it twice."""
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} is not of this pool (0 .. {self.num_pages - 1})")
            if not self._is_taken[page]:
                raise ValueError(f"page {page} is free already: it was freed twice")
            self._is_taken[page] = 0
            self._free.append(page)
