"""The radix tree: which prefixes' KV lies in which pages.

A node's key is a run of tokens, its pages hold their KV. Children of one node differ in their first token.
Runs begin and end anywhere, pages do not, so a run may begin inside a page. Each page is owned by one node; a
node that begins inside a page either *continues* that page, which an ancestor owns, or *overrides* it with one of
its own, which then holds the tokens before the run as well. With 4 tokens to a page:

    slot           0           1           2
    root ─ [ t0 t1 t2 t3 | t4 t5 ]                      owns pages 7 8        first_slot 0
              ├─ continues:  [ · · t6 t7 | t8 ]         owns page 3           first_slot 2, table 7 8 3
              └─ overrides:  [ · · u6 ]                 owns page 5           first_slot 1, table 7 5

Where a prefix is shared by all namespaces, they part at its end: each continues under a *gate*, an empty node of
its own. Such a prefix is locked for good, and ends with a page, so a gate's children begin with one.

    root ─ [ shared prefix ] ─┬─ tokens of the prefix's own namespace
                              ├─ gate of a ─ tokens of a
                              └─ gate of b ─ tokens of b

The page table of a path is the walk from the root with `table[node.first_slot:] = node.pages` at each node.

Locking a node locks the path above it. Only unlocked leaves are evicted, so a node's ancestors are always present:
a prefix is held whole or not at all. Nothing here recurses: a tree may be as deep as a sequence is long.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from cache.eviction import EvictionQueue, EvictionStrategy
from cache.news.block_record import BlockRecord
from cache.node import Namespace, Node
from cache.resume.resume_points import ResumePoints


class RadixTree:
    """Nodes, their locks and their order of eviction. The caller supplies pages and gets them back."""

    def __init__(
        self,
        page_size: int,
        strategy: EvictionStrategy,
        record: BlockRecord | None = None,
        resume_points: ResumePoints | None = None,
    ) -> None:
        """`resume_points`: those of this tree's nodes, which are dropped with them."""
        self.page_size = page_size
        self.evictable_pages = 0
        """Pages of unlocked nodes. All of them can be evicted: nothing below an unlocked node is locked."""
        self.locked_pages = 0
        self.surplus: list[int] = []
        """Pages that are no longer needed. They belong to the caller, which empties this list."""
        self.roots: dict[Namespace, Node] = {}
        """The root of each namespace in which something is held or locked."""
        self._queue = EvictionQueue(strategy)
        self._record, self.resume_points = record, resume_points

    # Finding

    def find_root(self, namespace: Namespace) -> Node | None:
        """Return the namespace's root, or None if nothing is held or locked in it."""
        return self.roots.get(namespace)

    def root(self, namespace: Namespace) -> Node:
        """Return the namespace's root, new if need be. A new root must immediately be locked or get a child."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(namespace, None, 0, array("i"), 0, [])
            if self._record is not None:
                self._record.begin(root)
        return root

    def origin(self, node: Node) -> Node:
        """Return the root or gate below which `node` lies, where its namespace's own tokens begin. O(depth)."""
        while node.tokens:
            assert node.parent is not None, "a root has no tokens"
            node = node.parent
        return node

    def gate(self, node: Node, namespace: Namespace) -> Node:
        """Return where `namespace` continues after `node`, the end of a shared prefix; new if need be.

        A new gate must immediately be locked or get a child, as a new root.
        """
        assert node.pins and node.end % self.page_size == 0 and node.namespace != namespace
        gates = node.gates = {} if node.gates is None else node.gates
        gate = gates.get(namespace)
        if gate is None:
            gate = gates[namespace] = Node(namespace, node, node.end, array("i"), node.end // self.page_size, [])
            if self._record is not None:
                self._record.begin(gate)
        return gate

    def walk(self, node: Node, tokens: Sequence[int], stop: int) -> tuple[Node, int]:
        """Follow `tokens` from `node.end` up to `stop`. Return the last node entered and the position reached.

        Changes nothing. O(tokens followed): tokens after them are not read.
        """
        position = node.end
        while position < stop:
            child = node.children.get(tokens[position])
            if child is None:
                break
            position += common_prefix(child.tokens, tokens, position, stop)
            node = child
            if position < child.end:
                break
        return node, position

    def table(self, node: Node) -> list[int]:
        """Return the page table of the path down to `node.end`. O(pages + depth)."""
        table: list[int] = []
        for step in reversed(self.path(node)):
            table[step.first_slot :] = step.pages
        return table

    def tail_page(self, node: Node) -> int:
        """Return the page that holds the node's last token. O(nodes within that page)."""
        while not node.pages:  # It continues a page of an ancestor.
            assert node.parent is not None, "a root ends in no page"
            node = node.parent
        return node.pages[-1]

    def path(self, node: Node, top: Node | None = None) -> list[Node]:
        """Return the nodes from `node` up to `top`, or up to the root, without the latter. O(their number)."""
        nodes = []
        step: Node | None = node
        while step is not top and step is not None and step.parent is not None:
            nodes.append(step)
            step = step.parent
        return nodes

    # Using

    def touch(self, node: Node, now: float) -> None:
        """Record a use of the path down to `node` at `now` (seconds). O(depth)."""
        path = self.path(node)
        for step in path:
            step.last_access = now
        if self._record is not None:
            self._record.use(path)

    def record_use(self, node: Node, priority: int) -> None:
        """Count the admission of a request of that priority with the path down to `node`. O(depth)."""
        for step in self.path(node):
            step.hits += 1
            step.priority = min(step.priority, priority)

    def lock(self, node: Node) -> None:
        """Protect the path down to `node` from eviction, once more. O(nodes that were not locked before)."""
        node.num_holders += 1
        step: Node | None = node
        while step is not None:
            step.pins += 1
            if step.pins > 1:
                return
            self.evictable_pages -= len(step.pages)
            self.locked_pages += len(step.pages)
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Raises ValueError when there is none to undo."""
        if not node.num_holders:
            raise ValueError(f"{node} is not locked: it was unlocked twice")
        node.num_holders -= 1
        step: Node | None = node
        while step is not None:
            step.pins -= 1
            if step.pins:
                break
            self.locked_pages -= len(step.pages)
            self.evictable_pages += len(step.pages)
            parent = step.parent
            self._became_idle(step)
            step = parent
        self._share_tail(node)

    # Changing

    def cut(self, node: Node, position: int) -> Node:
        """Return the node on the path to `node` that ends at `position`, split if need be.

        0 < position <= node.end.
        """
        while node.start >= position and node.end > position:  # a gate holds no tokens
            assert node.parent is not None, "the position is on the path"
            node = node.parent
        return self.split(node, position) if position < node.end else node

    def split(self, node: Node, position: int) -> Node:
        """Split `node` in two and return the new upper part. O(tokens in the lower part).

        The lower part stays the same object, so leases that hold it still hold the same tokens. The same pages
        hold the same tokens, and as many are locked as before.
        """
        parent, head = node.parent, position - node.start
        assert parent is not None and 0 < head < len(node.tokens)
        kept = -(-position // self.page_size) - node.first_slot
        upper = Node(node.namespace, parent, node.start, node.tokens, node.first_slot, node.pages)
        # Two buffers of their own size: neither part keeps the other's tokens in memory.
        node.tokens, node.pages = node.tokens[head:], node.pages[kept:]
        del upper.tokens[head:], upper.pages[kept:]
        node.start = upper.end = position
        node.first_slot, node.parent = node.first_slot + kept, upper
        upper.children[node.tokens[0]] = node
        parent.children[upper.tokens[0]] = upper
        if position % self.page_size:
            upper.continuation = node
        if parent.continuation is node:
            parent.continuation = upper
        upper.pins = 1 if node.pins else 0  # its only child locks it if that is locked
        upper.last_access, upper.hits, upper.priority = node.last_access, node.hits, node.priority
        if self._record is not None:
            self._record.split(upper, node)
        return upper

    def attach(self, parent: Node, tokens: array[int], first_slot: int, pages: list[int]) -> Node:
        """Add a child that begins at `parent.end`; the tree owns `pages` from now on.

        Lock it immediately: it becomes evictable by being unlocked.
        """
        assert tokens and tokens[0] not in parent.children
        node = Node(parent.namespace, parent, parent.end, tokens, first_slot, pages)
        parent.children[tokens[0]] = node
        if first_slot * self.page_size > parent.end:
            parent.continuation = node
        self.evictable_pages += len(pages)
        if self._record is not None:
            self._record.grow(node, node.start)
        return node

    def append(self, node: Node, tokens: array[int], pages: list[int]) -> None:
        """Extend a locked leaf by `tokens`; the tree owns `pages` from now on."""
        assert node.pins and not node.children
        end = node.end
        node.tokens.extend(tokens)
        node.end += len(tokens)
        node.pages.extend(pages)
        self.locked_pages += len(pages)
        if self._record is not None:
            self._record.grow(node, end)

    def replace_tail(self, node: Node, page: int) -> int | None:
        """Replace the page that `node` ends in by `page`, which holds the same tokens and more.

        Returns the page that is no longer needed. Returns None, with nothing changed, when it may still be needed:
        other nodes continue the node or leases hold it, and so may write on in its page, or the page is being
        copied.
        """
        owner = self._uncopied_tail_owner(node)
        if node.children or node.is_locked or owner is None:
            return None
        replaced, owner.pages[-1] = owner.pages[-1], page
        return replaced

    def merge_tail(self, node: Node, child: Node) -> int | None:
        """Give up the page that `node` ends in, where `child` overrides it: the child's page serves both.

        Returns the page to the only lease that writes in it, or None, with nothing changed, while it is being
        copied.
        """
        owner = self._uncopied_tail_owner(node)
        if owner is None:
            return None
        returned, owner.pages[-1] = owner.pages[-1], child.pages.pop(0)
        child.first_slot += 1
        node.continuation = child
        if child.is_locked:
            self.locked_pages -= 1
        else:
            self.evictable_pages -= 1
        return returned

    def next_to_go(self) -> Node | None:
        """Return the leaf that `evict` would take first, if any. O(log n) amortised over touches."""
        return self._queue.peek()

    def evict(self, num_pages: int | None = None, watch: Callable[[Node], None] | None = None) -> list[int]:
        """Take up to `num_pages` pages from the ends of unlocked leaves, or all pages of unlocked nodes for None.

        Returns the pages, which belong to the caller; it may be one more, where an evicted leaf was the only one
        to continue a page. O(k log n) for k pages, never a walk of the tree. `watch` is called with each node
        of which all pages are evicted, while it is still in the tree.
        """
        freed: list[int] = []
        while num_pages is None or len(freed) < num_pages:
            node = self._queue.pop()
            if node is None:
                break
            if not node.pages and self._rejoin(node):
                continue  # Evicting it would lose tokens without freeing a page.
            surplus = 0 if num_pages is None else len(node.pages) - (num_pages - len(freed))
            if surplus > 0:  # Keep the head as a node of its own; `node` is the part to evict.
                self.split(node, (node.first_slot + surplus) * self.page_size)
            freed.extend(reversed(node.pages))
            if watch is not None:
                watch(node)
            self.evictable_pages -= len(node.pages)
            parent = node.parent
            self._remove(node)
            if parent is not None:
                self._share_tail(parent)
            freed.extend(self.surplus)
            self.surplus.clear()
        return freed

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens[0]]
        if parent.continuation is node:
            parent.continuation = None
        node.parent = None
        if self.resume_points is not None:
            self.resume_points.drop(node)
        if self._record is not None:
            self._record.remove(node)
        if not parent.is_locked:
            self._became_idle(parent)

    def _rejoin(self, leaf: Node) -> bool:
        """Join a leaf with its unlocked parent if it is the only child. O(tokens in the leaf)."""
        parent = leaf.parent
        if parent is None or parent.is_locked or len(parent.children) > 1 or parent.resume_point is not None:
            return False
        parent.tokens.extend(leaf.tokens)
        parent.end = leaf.end
        parent.last_access = max(parent.last_access, leaf.last_access)
        if self._record is not None:
            self._record.join(parent, leaf)
        if self.resume_points is not None:
            self.resume_points.move(leaf, parent)
        self._remove(leaf)
        return True

    def _share_tail(self, node: Node) -> None:
        """Let a child that overrides the page `node` ends in serve both, unless a node or a lease uses that page.

        Called when `node` lost a lease, a copier or a child. Without it every branch inside a page would keep the
        pages of earlier branches for as long as it lives.
        """
        page_of_end = node.end // self.page_size
        while node.continuation is not None and node.continuation.end // self.page_size == page_of_end:
            node = node.continuation  # Sharing may have been impossible while the page was copied.
        is_used = node.continuation is not None or node.num_holders  # A lease may continue to write in it.
        if is_used or not node.children or not node.end % self.page_size:
            return
        newest_first = reversed(node.children.values())  # Of unlocked ones, the newest stays longest.
        child = next(child for child in newest_first if child.is_locked or not node.pins)
        page = self.merge_tail(node, child)
        self.surplus.extend([] if page is None else [page])

    def _became_idle(self, node: Node) -> None:
        """Queue `node`, which was unlocked or lost a child, if it can be evicted; drop an unused root or gate."""
        if node.is_evictable:
            self._queue.push(node)
        elif not node.tokens and not node.children:
            if node.parent is None:
                del self.roots[node.namespace]
            elif node.parent.gates is not None:
                del node.parent.gates[node.namespace]
                node.parent = None

    def _uncopied_tail_owner(self, node: Node) -> Node | None:
        """Return the owner of the page in which `node` ends; None while that page is being copied."""
        while not node.copying:
            if node.pages:
                return node
            assert node.parent is not None, "a root ends in no page"
            node = node.parent
        return None


def sequence(node: Node) -> array[int]:
    """Return all tokens up to `node.end`, from its root on. O(their number + depth)."""
    runs: list[array[int]] = []
    step: Node | None = node
    while step is not None:
        runs.append(step.tokens)
        step = step.parent
    tokens = array("i")
    for run in reversed(runs):
        tokens.extend(run)
    return tokens


def page_of(node: Node, slot: int) -> int:
    """Return the page in which a node, or one above it that ends inside the page, has a slot's tokens."""
    step = node
    while step.first_slot > slot:
        assert step.parent is not None, "the first page has an owner"
        step = step.parent
    return step.pages[slot - step.first_slot]


def common_prefix(run: array[int], tokens: Sequence[int], start: int, stop: int) -> int:
    """Count the leading tokens of `run` that equal those of tokens[start:stop]. O(result): compares slices.

    Each slice is twice as long as the one before, up to the first difference, which bisection then finds.
    """
    low, size, stop = 0, 16, min(len(run), stop - start)
    while low < stop:
        high = low + size if low + size < stop else stop
        ours, theirs = run[low:high], tokens[start + low : start + high]
        if not isinstance(theirs, array):  # All arrays of tokens have the type of `ours`.
            theirs = array("i", theirs)
        if ours != theirs:
            return low + first_difference(ours, theirs)
        low, size = high, 2 * size
    return stop


def first_difference(ours: array[int], theirs: array[int]) -> int:
    """Return the index of the first difference; there must be one. O(length)."""
    low, high = 0, len(ours)  # equal before `low`, a difference before `high`
    while high - low > 1:
        middle = (low + high) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle
    return low
