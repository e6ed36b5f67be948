"""What the cache reports of itself: where every page is, and what was reused so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class PageAccount(NamedTuple):
    """Every page is in exactly one of these places, so `total` is the size of the pool at all times."""

    free: int
    """Pages that nobody holds."""
    evictable: int
    """Pages of the tree that no running request relies on."""
    locked: int
    """Pages of the tree that running requests rely on; shared by any number of them, counted once."""
    private: int
    """Pages that belong to one running request."""

    @property
    def total(self) -> int:
        """Sum of all places, in pages."""
        return self.free + self.evictable + self.locked + self.private


@dataclass(slots=True)
class CacheStats:
    """Totals since the start; they only grow. Hits are counted at admission, once for each request."""

    query_tokens: int = 0
    """Tokens of requests admitted for the first time."""
    hit_tokens: int = 0
    """Of these, tokens whose KV was found in the cache."""
    recompute_query_tokens: int = 0
    """Tokens of requests admitted again after a preemption."""
    recompute_hit_tokens: int = 0
    """Of these, tokens whose KV was still there."""
    recompute_host_tokens: int = 0
    """Of these, tokens whose KV was no longer there, but came back from host memory."""
    inserted_tokens: int = 0
    """Tokens that became reusable, each counted when the tree took its KV."""
    copied_pages: int = 0
    """Pages copied because a match ended inside them."""
    evicted_pages: int = 0
    """Pages taken from the tree to make room; those dropped by `reset` not included."""
    reset_pages: int = 0
    """Pages that `reset` dropped."""
