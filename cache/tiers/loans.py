"""Loans: prefixes of the tree whose pages stay unchanged while another process reads them.

    root ─ [ a | pages 3 9 ] ─┬─ [ b | page 4 ]        lent up to the end of b: 3 9 4
                              └─ [ c | page 7 ]        a request holds c: 3 and 9 are locked, only 4 is lent

A loan locks a path as a lease does, but is no use of it: it counts as no hit and changes no order of eviction.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from cache.node import Node
from cache.radix_tree import RadixTree

ANY_TOKEN = -1
"""Stands for the token that a prompt computes after the lent ones."""


class Loan(NamedTuple):
    """Leading pages of a prompt that are lent."""

    node: Node
    """Ends where the last of them does."""
    pages: list[int]


class Loans:
    """The loans of one tree. Not thread-safe."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._ends = Counter[Node]()

    def lend(self, node: Node | None, length: int) -> Loan | None:
        """Lock the whole pages of the path to `node` up to `length`; None if there are none. O(pages + depth)."""
        length -= length % self._tree.page_size
        if node is None or not length:
            return None
        end = self._tree.cut(node, length)
        self._tree.lock(end)
        self._ends[end] += 1
        return Loan(end, self._tree.table(end))

    def take_back(self, loan: Loan) -> Node:
        """Note that a loan has ended, and return the node to be unlocked."""
        self._ends[loan.node] -= 1
        if not self._ends[loan.node]:
            del self._ends[loan.node]
        return loan.node

    def count_pages(self) -> int:
        """Count the pages that nothing but loans locks. O(nodes of their paths), 0 without loans.

        A node is locked by those that hold it and by its locked children, so the lowest nodes are looked at first.
        """
        if not self._ends:
            return 0
        path = {step for node in self._ends for step in self._tree.path(node)}
        num_pages, num_lent = 0, Counter[Node]()  # node -> its children that only loans lock
        for node in sorted(path, key=lambda node: (node.end, not node.tokens), reverse=True):
            if node.num_holders == self._ends[node] and node.pins == node.num_holders + num_lent[node]:
                num_pages += len(node.pages)
                if node.parent is not None:
                    num_lent[node.parent] += 1
        return num_pages
