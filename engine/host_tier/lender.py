"""Lends an engine's KV to other engines: first the pages of the device's tree, then those of host memory.

position   0 ........... first ............ held by the tree ............. held by the host
                         [ device pages   | host pages                   ] lent

Lent pages are whole, and stay unchanged until they are given back: steps write into no whole page.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from cache import KVCacheManager, Namespace
from cache.tiers.loans import Loan
from cache.tiers.page_keys import PageKeys
from cache.tiers.page_tier import TierPage
from engine.host_tier.host_kv import HostKV
from engine.host_tier.peers import LentPages


class _Lent(NamedTuple):
    """The pages of one loan."""

    device: Loan | None
    host: list[TierPage]


class Lender:
    """Owns the loans. Not thread-safe: only the engine's loop uses it, between two steps."""

    def __init__(self, cache: KVCacheManager, host: HostKV) -> None:
        self._cache, self._host = cache, host
        self._lent: dict[int, _Lent] = {}
        self._numbers = itertools.count(1)

    def lend(self, namespace: Namespace, tokens: Sequence[int], first: int) -> LentPages:
        """Keep the whole pages of `tokens` from position `first` up to the first gap unchanged until `give_back`.
        A loan does not count as a use of them. O(tokens).

        If no page is lent, there is nothing to give back. Raises ValueError for a negative position.
        """
        if first < 0:
            raise ValueError(f"the first page must be at position 0 or later, got {first}")
        number, page_size = next(self._numbers), self._cache.page_size
        loan = self._cache.lend(namespace, tokens)
        if loan is not None and len(loan.pages) <= first:
            self._cache.take_back(loan)
            loan = None
        device = () if loan is None else tuple(loan.pages[first:])
        start, stop = first + len(device), len(tokens) // page_size
        host: list[TierPage] = []
        if start < stop and self._host.num_pages:
            host = self._host.lend(PageKeys(namespace, tokens, page_size, start), start, stop)
        if device or host:
            self._lent[number] = _Lent(loan, host)
        return LentPages(number, first, device, tuple(page.page for page in host))

    def give_back(self, number: int) -> None:
        """End a loan. Ignores numbers that are not those of an open loan."""
        lent = self._lent.pop(number, None)
        if lent is None:
            return
        if lent.device is not None:
            self._cache.take_back(lent.device)
        self._host.take_back(lent.host)
