"""Resume points: what a request needs at the end of a prefix, besides its pages, to resume there.

A recurrent layer needs its state (`snapshots`), a layer with a window the pages of its last tokens (`windows`).
Either is known by a number, which a node of the tree carries. A resume point is dropped with its node, or before
it when memory runs short: the least recently used first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable

from cache.node import Node


class ResumePoints(ABC):
    """The resume points of one tree, by node, and their order of eviction. Not thread-safe."""

    def __init__(self) -> None:
        self._idle = OrderedDict[Node, float]()
        """Nodes whose state may be given up, the least recently used first, and seconds of its last use."""
        self.pins = Counter[Node]()
        """Nodes whose state is kept for good, or while it is read, and how often each is pinned."""
        self.on_give_up: Callable[[Node], None] = lambda node: None
        """Called with each node that loses only its resume point to make room, before it does: the state stays
        readable for the step that is being planned."""

    @abstractmethod
    def free(self, state: int) -> None:
        """Give a state back that was taken and that no node carries."""

    @abstractmethod
    def _carried(self, state: int) -> None:
        """Note that a node carries a state from now on."""

    @abstractmethod
    def _dropped(self, state: int) -> None:
        """Give a state back that a node carried."""

    def keep(self, node: Node, state: int) -> None:
        """Let a node carry a state; free it if the node has one already."""
        if node.resume_point is not None:
            self.free(state)
        else:
            self._carried(state)
            node.resume_point = state
            self._idle[node] = node.last_access
        self.use(node)

    def use(self, node: Node) -> None:
        """Record a use of a node's state."""
        if node in self._idle:
            self._idle[node] = node.last_access
            self._idle.move_to_end(node)

    def move(self, node: Node, to: Node) -> None:
        """Note that another node ends where `node` did. Neither is pinned, and `to` has no state."""
        if node.resume_point is not None:
            self._idle[to] = self._idle.pop(node)
            to.resume_point, node.resume_point = node.resume_point, None

    def drop(self, node: Node) -> None:
        """Free a node's state, if it has one."""
        if node.resume_point is not None:
            del self._idle[node]
            state, node.resume_point = node.resume_point, None
            self._dropped(state)

    def give_up(self, node: Node) -> None:
        """Free a node's state to make room for others."""
        self.on_give_up(node)
        self.drop(node)

    def pin(self, node: Node) -> int:
        """Keep a node's state until `unpin`, and return it. The node is locked meanwhile."""
        assert node.resume_point is not None
        self._idle.pop(node, None)
        self.pins[node] += 1
        return node.resume_point

    def unpin(self, node: Node) -> None:
        """Undo one `pin`, which counts as a use."""
        self.pins[node] -= 1
        if not self.pins[node]:
            del self.pins[node]
            self._idle[node] = node.last_access


def deepest_resume_point(node: Node | None, length: int) -> Node | None:
    """Return the deepest node with a resume point on the path to `node`, up to position `length`. O(depth)."""
    while node is not None and (node.resume_point is None or node.end > length):
        node = node.parent
    return node
