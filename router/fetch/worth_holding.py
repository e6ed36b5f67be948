"""Shared prefixes as the fleet holds them: the lenders for a new replica, and what is lost with a replica."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cache.node import Namespace
from cache.shared.shared_prefixes import SharedPrefixes
from router.fetch.fetch_sources import FetchSources
from router.fetch.hot_prefixes import HotPrefix, HotPrefixes
from router.fleet import Fleet
from router.overlap import Overlap
from router.prefix_index import PrefixIndex


class WorthHolding:
    """The prefixes of one fleet that are most worth holding. Thread-safe, except for `record`."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        sources: FetchSources,
        hot: HotPrefixes | None,
        lock: threading.Lock,
        clock: Callable[[], float],
    ) -> None:
        """`lock` is held while any argument is read or changed; `hot` is None where no use is tracked."""
        self._fleet, self._index, self._sources, self._hot = fleet, index, sources, hot
        self._lock, self._clock = lock, clock
        self.shared = SharedPrefixes()
        """The operator's prefixes of prompts, by which their blocks are hashed."""

    def record(self, namespace: Namespace, tokens: Sequence[int], chain: Sequence[int], now: float) -> None:
        """Note that a prompt has come. The caller holds the lock."""
        if self._hot is not None:
            self._hot.record(namespace, tokens, chain, now)

    def top(self, max_tokens: int) -> list[HotPrefix]:
        """Return the most valuable, at most `max_tokens` tokens together, and the replicas that lend them.

        O(tokens) where replicas lend KV.
        """
        prefixes = self._top(max_tokens)
        return [self._with_source(prefix) for prefix in prefixes] if self._fleet.lenders() else prefixes

    def only_held_by(self, replica: str, max_tokens: int) -> Iterator[HotPrefix]:
        """Yield those of which a replica holds more than any other that stays, cut where its part ends: of the
        top `max_tokens` tokens. Each step is O(tokens of a prefix).
        """
        others = self._fleet.names() - self._fleet.draining() - {replica}
        for prefix in self._top(max_tokens):
            chain = self._chain(prefix)
            with self._lock:
                overlap = self._overlap(chain)
                held = overlap.get(replica, 0)
                elsewhere = overlap.most_among(others)
            if held > elsewhere:
                yield replace(prefix, token_ids=prefix.token_ids[:held], elsewhere=elsewhere)

    def _top(self, max_tokens: int) -> list[HotPrefix]:
        with self._lock:
            return [] if self._hot is None or not max_tokens else self._hot.top(max_tokens, self._clock())

    def _with_source(self, prefix: HotPrefix) -> HotPrefix:
        chain = self._chain(prefix)
        with self._lock:
            return replace(prefix, source=self._sources.best_holder(self._overlap(chain)))

    def _chain(self, prefix: HotPrefix) -> Sequence[int]:
        return self.shared.chain(prefix.namespace, prefix.token_ids, self._index.block_tokens)

    def _overlap(self, chain: Sequence[int]) -> Overlap:
        return self._index.match(chain, self._clock()).times(self._index.block_tokens)
