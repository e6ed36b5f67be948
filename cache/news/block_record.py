"""The hashes of the tree's blocks: each node knows those of the blocks that end in it.

    tokens     |0 . . .|4 . . .|8 . . .|12 . .          blocks of 4
    node       [ 0 ........ 6 ) [ 6 ....... 13 )
    blocks        h0                h1  h2              block 1 begins in the node above; block 3 is not whole

A node's run may end anywhere, so a block belongs to the node where it ends: what is cut off a node's end and
evicted takes every block along that is no longer whole. Blocks and pages may differ in size.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from cache.news.prefix_log import PrefixLog
from cache.news.recent_runs import RecentRuns
from cache.node import Node
from cache.prefix_hash import block_hashes, gate_root, prefix_root


class BlockRecord:
    """Keeps `Node.blocks` up to date and logs blocks that appear and disappear. The tree reports every change.

    The only block of a root or a gate is that with which its chains begin; it is not logged.
    """

    def __init__(self, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        self.block_tokens = block_tokens
        self._recent = RecentRuns()
        self.log = PrefixLog(self._recent)

    def begin(self, root: Node) -> None:
        """Note the root of a namespace with its first request, or its gate at the end of a shared prefix."""
        if root.parent is None:
            root.blocks.append(prefix_root(root.namespace))
        else:
            root.blocks.append(gate_root(root.parent.blocks[-1], root.namespace))

    def grow(self, node: Node, grown_from: int) -> None:
        """Note that `node` gained the tokens from position `grown_from` on. O(their number + `block_tokens`)."""
        size = self.block_tokens
        begin = grown_from - grown_from % size
        if node.end - begin < size:
            return
        above, step = array("i"), node
        while step.start > begin:  # The first block begins in a node above, at most `block_tokens` up.
            assert step.parent is not None, "roots begin at 0"
            step = step.parent
            above = step.tokens[max(begin - step.start, 0) :] + above
        tokens = above + node.tokens[max(begin - node.start, 0) :]
        step = node
        while not step.blocks:
            assert step.parent is not None, "roots have a block"
            step = step.parent
        hashes = block_hashes(tokens, step.blocks[-1], size)
        if self.log.events is not None:
            self.log.events.store(node.namespace, _last_told(step), hashes, tokens)
        node.blocks.extend(hashes)
        self.log.store(hashes)

    def split(self, upper: Node, lower: Node) -> None:
        """Note that `lower` was split: the blocks that end in its front now belong to `upper`."""
        count = upper.end // self.block_tokens - upper.start // self.block_tokens
        upper.blocks, lower.blocks = lower.blocks[:count], lower.blocks[count:]
        self._recent.split((upper.start, upper.blocks), (lower.start, lower.blocks))

    def join(self, upper: Node, lower: Node) -> None:
        """Note that `lower`'s tokens belong to `upper` from now on."""
        if lower.blocks:
            upper.blocks.extend(lower.blocks)
            self._recent.join(lower.blocks[0], (upper.start, upper.blocks))
        lower.blocks = []

    def use(self, path: Iterable[Node]) -> None:
        """Note a use of a path, from its end up. O(nodes)."""
        self._recent.use([(node.start, node.blocks) for node in path])

    def remove(self, node: Node) -> None:
        """Note that `node` left the tree."""
        self._recent.forget(node.blocks)
        self.log.evict(node.blocks)


def _last_told(node: Node) -> int | None:
    """Return the last block of a node, of which a root has none, and a gate that of the shared prefix above."""
    if node.tokens:
        return node.blocks[-1]
    return None if node.parent is None else node.parent.blocks[-1]
