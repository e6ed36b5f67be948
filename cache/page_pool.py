"""The pool of page ids of one KV memory: any free page is allocated in O(1)."""

from __future__ import annotations

from collections.abc import Iterable


class OutOfPages(Exception):
    """Raised when more pages are wanted than are free or can be evicted; nothing has changed then."""


class PagePool:
    """Allocates page ids 0 .. num_pages - 1, the page freed last first: it is probably still in a CPU cache."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self.free_pages = list(range(num_pages - 1, -1, -1))
        """Those that are free, the next to be allocated last."""
        self._is_taken = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Number of free pages. O(1)."""
        return len(self.free_pages)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, all or none. O(count). Raises OutOfPages when fewer are free."""
        if count < 0:
            raise ValueError(f"the number of pages to allocate must be at least 0, got {count}")
        if count > len(self.free_pages):
            raise OutOfPages(f"{count} pages wanted, {len(self.free_pages)} of {self.num_pages} free")
        pages = [self.free_pages.pop() for _ in range(count)]
        for page in pages:
            self._is_taken[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. O(1) each. Raises ValueError for a page that is not taken, such as one freed twice."""
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} does not belong to this pool (0 .. {self.num_pages - 1})")
            if not self._is_taken[page]:
                raise ValueError(f"page {page} is free already: it was freed twice")
            self._is_taken[page] = 0
            self.free_pages.append(page)
