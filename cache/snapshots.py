"""Slots for the states of recurrent layers: which are free, and which hold the state at the end of a node.

What attention keeps of a prefix is found page by page. A recurrent layer keeps one state of constant size, which
only leads on from where it was taken: a prefix can be reused up to the deepest node that has a *snapshot*.

    root ─ [ system prompt | slot 3 ] ─┬─ [ question | slot 7 ] ─ [ answer | slot 1 ]
                                       └─ [ another question ]                            reusable up to slot 3

A running request has a slot of its own. A snapshot goes with its node, or by itself when slots run short: the one
first that was not used for the longest time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from cache.node import Node
from cache.page_pool import PagePool


class StateAccount(NamedTuple):
    """Slots by state. Every slot is in exactly one, so `total` is their number at all times."""

    free: int
    evictable: int
    """Snapshots that may be given up for others."""
    locked: int
    """Snapshots that a request is about to read, and those of prefixes that all namespaces share."""
    private: int
    """Slots of running requests, with states that are about to become snapshots."""

    @property
    def total(self) -> int:
        """Sum over all states, in slots."""
        return sum(self)


class Snapshots:
    """Owns the slots. Not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._pool = PagePool(num_slots)
        self._idle = OrderedDict[Node, None]()  # the least recently used first
        self._pins = Counter[Node]()
        self._num_private = 0

    def account(self) -> StateAccount:
        """Count the slots in each state. O(1)."""
        return StateAccount(self._pool.num_free, len(self._idle), len(self._pins), self._num_private)

    def take(self) -> int | None:
        """Take a slot, if need be that of the least recently used snapshot; None if all are needed. O(1)."""
        if not self._pool.num_free:
            if not self._idle:
                return None
            self.drop(next(iter(self._idle)))
        self._num_private += 1
        return self._pool.allocate(1)[0]

    def free(self, slot: int) -> None:
        """Give a slot back that was taken."""
        self._num_private -= 1
        self._pool.free([slot])

    def keep(self, node: Node, slot: int) -> None:
        """Make a slot that was taken the snapshot at the node's end; free it if there is one already."""
        if node.state is not None:
            self.free(slot)
        else:
            self._num_private -= 1
            node.state = slot
            self._idle[node] = None
        self.use(node)

    def use(self, node: Node) -> None:
        """Record a use of a node's snapshot."""
        if node in self._idle:
            self._idle.move_to_end(node)

    def move(self, node: Node, to: Node) -> None:
        """Note that another node ends where `node` did. Neither is pinned, and `to` has no snapshot."""
        if node.state is not None:
            place = self._idle.pop(node)
            to.state, node.state, self._idle[to] = node.state, None, place

    def drop(self, node: Node) -> None:
        """Free the slot of a node's snapshot, if it has one."""
        if node.state is not None:
            del self._idle[node]
            self._pool.free([node.state])
            node.state = None

    def pin(self, node: Node) -> int:
        """Keep a node's snapshot until `unpin`, and return its slot. The node is locked meanwhile."""
        assert node.state is not None
        self._idle.pop(node, None)
        self._pins[node] += 1
        return node.state

    def unpin(self, node: Node) -> None:
        """Undo one `pin`, which counts as a use."""
        self._pins[node] -= 1
        if not self._pins[node]:
            del self._pins[node]
            self._idle[node] = None


def deepest_snapshot(node: Node | None, length: int) -> Node | None:
    """Return the deepest node with a snapshot on the path to `node` that ends at most at `length`. O(depth)."""
    while node is not None and (node.state is None or node.end > length):
        node = node.parent
    return node
