"""The cache's figures: the state of every page, and totals of what was reused."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import NamedTuple


class PageAccount(NamedTuple):
    """Pages by state. Every page is in exactly one, so `total` is the size of the pool at all times."""

    free: int
    """Pages that are not in use."""
    evictable: int
    """Pages of the tree that no running request relies on."""
    locked: int
    """Pages of the tree that running requests rely on, shared by any number of them and counted once; and pages of
    prefixes that all namespaces share."""
    private: int
    """Pages that belong to one running request."""
    lent: int = 0
    """Pages of the tree that nothing but loans keeps from being evicted."""

    @property
    def total(self) -> int:
        """Sum over all states, in pages."""
        return sum(self)


@dataclass(slots=True)
class CacheStats:
    """Totals since the start; they only grow. Hits are counted at admission, once for each request."""

    query_tokens: int = 0
    """Tokens of requests admitted for the first time."""
    hit_tokens: int = 0
    """Part of `query_tokens` whose KV was found in the cache."""
    host_hit_tokens: int = 0
    """Part of `query_tokens` whose KV was not there, and was copied back from host memory."""
    recompute_query_tokens: int = 0
    """Tokens of requests admitted again after a preemption."""
    recompute_hit_tokens: int = 0
    """Part of `recompute_query_tokens` whose KV was still in the cache."""
    recompute_host_tokens: int = 0
    """Part of `recompute_query_tokens` whose KV was copied back from host memory."""
    inserted_tokens: int = 0
    """Tokens that became reusable, each counted when the tree took its KV."""
    copied_pages: int = 0
    """Pages copied because a match ended inside them."""
    evicted_pages: int = 0
    """Pages taken from the tree to make room, without those dropped by `reset`."""
    reset_pages: int = 0
    """Pages that `reset` dropped."""

    def admitted(self, query_tokens: int, hit_tokens: int, host_tokens: int, *, recompute: bool) -> None:
        """Count an admission; `recompute` says that the request was preempted before. `host_tokens`, in addition
        to `hit_tokens`, are copied back from host memory.
        """
        if not 0 <= hit_tokens <= hit_tokens + host_tokens <= query_tokens:
            raise ValueError(f"{hit_tokens} + {host_tokens} hit tokens of {query_tokens} query tokens")
        if recompute:
            self.recompute_query_tokens += query_tokens
            self.recompute_hit_tokens += hit_tokens
            self.recompute_host_tokens += host_tokens
        else:
            self.query_tokens += query_tokens
            self.hit_tokens += hit_tokens
            self.host_hit_tokens += host_tokens

    def copy(self) -> CacheStats:
        """Return the totals as they are now."""
        return CacheStats(*_totals(self))


_totals = attrgetter(*(total.name for total in fields(CacheStats)))
