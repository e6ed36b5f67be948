"""Shared prefixes in the tree of one engine: locked for good, and found from every namespace.

root ─ [ shared prefix ] ─┬─ gate of a ─ [ the rest of a's prompts ]
                          └─ gate of b ─ [ the rest of b's ]
"""

from __future__ import annotations

from collections.abc import Sequence

from cache.node import Namespace, Node
from cache.radix_tree import RadixTree
from cache.resume.resume_points import ResumePoints
from cache.shared.shared_prefixes import SharedPrefixes, own_namespace


class SharedInTree:
    """Looks prompts up, below the prefixes that their namespaces share. Not thread-safe."""

    def __init__(self, tree: RadixTree, block_tokens: int | None, resume_points: ResumePoints | None) -> None:
        """`resume_points`: those of the tree; None in models that need none."""
        self._tree, self._block_tokens, self._resume_points = tree, block_tokens, resume_points
        self._by_namespace: dict[Namespace, SharedPrefixes] = {}
        self.nodes: list[Node] = []
        """Where they end."""

    def share(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """Lock what is held of `tokens` in `namespace`, the one without a salt; all others find it then. Returns
        how many of them are shared: whole blocks and whole pages. Raises ValueError when they are not held.
        """
        shared = self._by_namespace.setdefault(namespace, SharedPrefixes(self._tree.page_size, self._block_tokens))
        length = len(tokens) - len(tokens) % shared.unit
        if not length:
            return 0
        root = self._tree.find_root(namespace)
        node, found = (None, 0) if root is None else self._tree.walk(root, tokens, length)
        if node is None or found < length:
            raise ValueError(f"{length} tokens are to be shared, but only {found} of them are held: compute them")
        end = self._tree.cut(node, length)
        if self._resume_points is not None and end.resume_point is None:
            raise ValueError(f"{length} tokens are to be shared, but the state after them is not held")
        if end not in self.nodes:
            self.nodes.append(end)
            self._tree.lock(end)
            if self._resume_points is not None:
                self._resume_points.pin(end)
        return shared.add(tokens[:length])

    def count_pages(self) -> int:
        """Count the tree's pages of all of them. O(pages)."""
        return len({page for table in map(self._tree.table, self.nodes) for page in table})

    def find(self, namespace: Namespace, tokens: Sequence[int]) -> tuple[Node | None, int]:
        """Return the node in which the longest held prefix of `tokens` ends, and its length, at most
        len(tokens) - 1; None and 0 if there is none. O(result).
        """
        if len(tokens) < 2:
            return None, 0
        root, stop = self._tree.find_root(namespace), len(tokens) - 1
        if self._by_namespace:
            own = own_namespace(namespace)
            shared = self._by_namespace.get(own)
            length = 0 if shared is None else shared.length(namespace, tokens)
            if length:
                root = self._tree.find_root(own)
                assert root is not None, "shared prefixes are locked"
                end, _ = self._tree.walk(root, tokens, length)
                root = (end.gates or {}).get(namespace, end)
                if root is end:
                    return end, length
        return (None, 0) if root is None else self._tree.walk(root, tokens, stop)

    def chain(self, namespace: Namespace, tokens: Sequence[int]) -> list[int]:
        """Return the hashes of the whole blocks of `tokens` (`SharedPrefixes.chain`). O(tokens)."""
        shared = self._by_namespace.get(own_namespace(namespace)) or SharedPrefixes()
        return shared.chain(namespace, tokens, self._block_tokens or self._tree.page_size)
