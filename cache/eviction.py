"""The order of eviction: strategies with one method, and the queue that applies them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from cache.node import Node


class EvictionStrategy(Protocol):
    """Orders the evictable leaves. The smallest key goes first.

    A key depends only on the node's `last_access`, `hits` and `priority`. The first two only
    grow and the last only falls. The key must not fall when they do: the queue relies on it.
    """

    def key(self, node: Node) -> tuple[float, ...]:
        """Return the node's place in the order."""


class LeastRecentlyUsed:
    """Evicts the leaf first that was not used for the longest time."""

    def key(self, node: Node) -> tuple[float, ...]:
        """Return (seconds of the last use,)."""
        return (node.last_access,)


class LeastFrequentlyUsed:
    """Evicts the leaf first that the fewest requests reused; among equals, the one not used for longer."""

    def key(self, node: Node) -> tuple[float, ...]:
        """Return (requests, seconds of the last use)."""
        return (node.hits, node.last_access)


class LowestPriority:
    """Evicts the leaf first whose users were least urgent; among equals, the one not used for longer."""

    def key(self, node: Node) -> tuple[float, ...]:
        """Return (minus the lowest priority of its users, seconds of the last use)."""
        return (-node.priority, node.last_access)


STRATEGIES: Mapping[str, type[EvictionStrategy]] = MappingProxyType(
    {"lru": LeastRecentlyUsed, "lfu": LeastFrequentlyUsed, "priority": LowestPriority}
)


def eviction_strategy(choice: str | EvictionStrategy) -> EvictionStrategy:
    """Return the strategy of that name, or a given strategy as it is. Raises ValueError for an unknown name."""
    if not isinstance(choice, str):
        return choice
    if choice not in STRATEGIES:
        raise ValueError(f"unknown eviction strategy {choice!r}; known are {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[choice]()


class EvictionQueue:
    """The evictable leaves in their order: a heap whose entries may be out of date.

    A node has at most one entry. Touching, locking or continuing a node leaves its entry as it is; an outdated
    entry is noticed when it reaches the top. Entries are only ever too early, never too late, so the first
    up-to-date entry is the one to evict.
    """

    def __init__(self, strategy: EvictionStrategy) -> None:
        self._strategy = strategy
        self._heap: list[tuple[tuple[float, ...], int, Node]] = []
        self._pushes = 0

    def push(self, node: Node) -> None:
        """Add a node that has become an unlocked leaf. O(log n)."""
        if node.queued:
            return
        node.queued = True
        self._pushes += 1
        heapq.heappush(self._heap, (self._strategy.key(node), self._pushes, node))

    def pop(self) -> Node | None:
        """Remove and return the leaf to evict first; None when there is none. O(log n) amortised over touches."""
        node = self.peek()
        if node is not None:
            heapq.heappop(self._heap)
            node.queued = False
        return node

    def peek(self) -> Node | None:
        """Return the leaf that `pop` would remove. O(log n) amortised over touches.

        The order of leaves with different keys does not depend on the number of calls.
        """
        while self._heap:
            key, _, node = self._heap[0]
            if node.is_evictable and self._strategy.key(node) == key:
                return node
            heapq.heappop(self._heap)
            node.queued = False
            if node.is_evictable:
                self.push(node)  # Otherwise it is pushed when it becomes an unlocked leaf again.
        return None
