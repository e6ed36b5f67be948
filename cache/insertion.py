"""Insertion of computed KV: a lease's tokens enter the tree, and its page table adopts the tree's pages.

position   0 ........... held.end ............. found ............ len(tokens)
tree       what the lease has locked | what others put there | nothing yet
lease      its pages are the tree's  | duplicates: freed     | given to the tree
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cache.lease import Lease
from cache.node import Node
from cache.page_pool import PagePool
from cache.radix_tree import RadixTree


def insert(tree: RadixTree, pool: PagePool, lease: Lease, tokens: Sequence[int], now: float) -> int:
    """Add those of `tokens` that the tree lacks, from the lease's lock on; return their number.

    On return the lease's lock is on the path of `tokens`, and `lease.pages[:num_shared]` are the tree's pages.
    Only whole pages are exchanged for the tree's: a step in flight, which writes after `tokens`, keeps its page.
    O(new tokens + nodes and pages passed).
    """
    held, page_size = lease.node, tree.page_size
    assert held is not None
    node, found = tree.walk(held, tokens, len(tokens))
    is_whole = found == len(tokens)
    if is_whole:
        found -= found % page_size  # Whole pages are shared; the lease keeps its own last page.
        if found <= held.end:
            return 0
    node = tree.cut(node, found) if found > held.end else held
    passed = tree.path(node, held)[::-1]
    if passed and not _leave_tail(tree, pool, lease, passed[0], found):
        return 0
    _share_whole_pages(pool, lease, passed, found // page_size)
    for step in passed:
        step.last_access = now
        step.priority = min(step.priority, lease.priority)
    num_added = 0 if is_whole else len(tokens) - found
    if num_added:
        node = _grow(tree, pool, lease, node, array("i", tokens[found:]))
        node.last_access = now
    tree.lock(node)  # Lock before releasing the old lock: the path must never be without one.
    tree.unlock(held)
    lease.node, lease.num_shared = node, -(-node.end // page_size)
    return num_added


def _leave_tail(tree: RadixTree, pool: PagePool, lease: Lease, child: Node, found: int) -> bool:
    """Continue the lease into `child` of its node. Where `child` overrides the page in which the node ends, both
    use the child's page from now on. The lease's page is freed if `found` is after it, else becomes private again.

    Return False if that page must become private but cannot, because another lease copies it.
    """
    assert lease.node is not None
    slot, inside = divmod(child.start, tree.page_size)
    if not inside or child.first_slot > slot:
        return True
    theirs, own = child.pages[0], tree.merge_tail(lease.node, child)
    is_behind = found // tree.page_size > slot
    if is_behind:
        lease.pages[slot] = theirs
        pool.free([] if own is None else [own])
    return is_behind or own is not None


def _share_whole_pages(pool: PagePool, lease: Lease, passed: list[Node], num_whole: int) -> None:
    """Put the tree's pages into the page table up to slot `num_whole` and free the lease's duplicates."""
    pool.free(lease.pages[lease.num_shared : num_whole])
    for node in passed:
        stop = min(node.first_slot + len(node.pages), num_whole)
        if node.first_slot < stop:
            lease.pages[node.first_slot : stop] = node.pages[: stop - node.first_slot]


def _grow(tree: RadixTree, pool: PagePool, lease: Lease, node: Node, added: array[int]) -> Node:
    """Add tokens after `node`, with the lease's pages. Return the node that holds them."""
    first_slot, inside = divmod(node.end, tree.page_size)
    if inside:
        own = lease.pages[first_slot]
        if own == tree.tail_page(node):
            first_slot += 1  # This page of the lease is the tree's already.
        elif (replaced := tree.replace_tail(node, own)) is not None:
            pool.free([replaced])
            first_slot += 1
    pages = lease.pages[first_slot : -(-(node.end + len(added)) // tree.page_size)]
    if node is lease.node and _is_one_with_its_successor(node, lease):
        tree.append(node, added, pages)
        return node
    child = tree.attach(node, added, first_slot, pages)
    child.priority = lease.priority
    return child


def _is_one_with_its_successor(node: Node, lease: Lease) -> bool:
    """Whether a chunk may extend the node of the previous chunk: only this lease holds it, and both chunks are
    equally worth keeping.
    """
    is_exclusive = node.pins == 1 and not node.children and bool(node.tokens) and node.resume_point is None
    return is_exclusive and not node.hits and node.priority == lease.priority
