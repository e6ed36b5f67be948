"""What goes first when memory is short: strategies with one method, and the queue that applies them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from cache.node import Node


class EvictionStrategy(Protocol):
    """Orders the evictable leaves. The smallest key goes first.

    A key depends on the node's `last_access`, `hits` and `priority` alone. These only grow, and the key must
    not fall when they do: the queue relies on it.
    """

    def key(self, node: Node) -> tuple[float, ...]:
        """The node's place in the order."""
        ...


class LeastRecentlyUsed:
    """What was not used for the longest time goes first."""

    def key(self, node: Node) -> tuple[float, ...]:
        """Seconds."""
        return (node.last_access,)


class LeastFrequentlyUsed:
    """What was reused by the fewest requests goes first, among equals the one not used for longer."""

    def key(self, node: Node) -> tuple[float, ...]:
        """Requests, seconds."""
        return (node.hits, node.last_access)


class LowestPriority:
    """What only requests of low priority used goes first, among equals the one not used for longer."""

    def key(self, node: Node) -> tuple[float, ...]:
        """Priority, seconds."""
        return (node.priority, node.last_access)


STRATEGIES: Mapping[str, type[EvictionStrategy]] = MappingProxyType(
    {"lru": LeastRecentlyUsed, "lfu": LeastFrequentlyUsed, "priority": LowestPriority}
)


def eviction_strategy(choice: str | EvictionStrategy) -> EvictionStrategy:
    """The strategy of that name; a strategy is returned as it is. Raises ValueError for an unknown name."""
    if not isinstance(choice, str):
        return choice
    if choice not in STRATEGIES:
        raise ValueError(f"unknown eviction strategy {choice!r}; known are {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[choice]()


class EvictionQueue:
    """The evictable leaves in their order: a heap whose entries may be out of date.

    A node has at most one entry. Touching, locking or continuing a node leaves its entry as it is; what is
    wrong with it is found when it comes up. Entries are only ever too early, never too late, so the first
    entry that is right is the one to evict.
    """

    def __init__(self, strategy: EvictionStrategy) -> None:
        self._strategy = strategy
        self._heap: list[tuple[tuple[float, ...], int, Node]] = []
        self._pushes = 0

    def push(self, node: Node) -> None:
        """Call when a node becomes an unlocked leaf. O(log n)."""
        if node.queued:
            return
        node.queued = True
        self._pushes += 1
        heapq.heappush(self._heap, (self._strategy.key(node), self._pushes, node))

    def pop(self) -> Node | None:
        """Take out the leaf that goes first; None when no node is evictable. O(log n) amortised over touches."""
        node = self.peek()
        if node is not None:
            heapq.heappop(self._heap)
            node.queued = False
        return node

    def peek(self) -> Node | None:
        """The leaf that `pop` would take out. O(log n) amortised over touches.

        The order of leaves with different keys does not depend on how often one has looked.
        """
        while self._heap:
            key, _, node = self._heap[0]
            if node.is_evictable and self._strategy.key(node) == key:
                return node
            heapq.heappop(self._heap)
            node.queued = False
            if node.is_evictable:
                self.push(node)  # Else it is pushed again when it becomes an unlocked leaf again.
        return None
