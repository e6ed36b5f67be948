"""A cache that is checked after every operation, against a brute-force model of what it ought to hold.

The model is KV memory that remembers what was written, and a set of all held prefixes. The KV of a token
is a number that stands for the token and everything before it. A wrong number shows that a page was read
that is not its own, that another request has written to since, or that was never written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cache import KVCacheManager, Lease, Namespace, OutOfPages, PageCopy
from cache.node import Node
from cache.tiers.loans import Loan

T = TypeVar("T")
NAMESPACES = (Namespace("m"), Namespace("m", "adapter"), Namespace("m", "", "salt"))


def kv_of(namespace: Namespace, tokens: Sequence[int], num_shared: int = 0) -> list[int]:
    """The KV content at each position; the first `num_shared` tokens are those of all salts."""
    own = Namespace(namespace.model, namespace.adapter, namespace.salt)
    content, chain = [], hash(Namespace(own.model, own.adapter) if num_shared else own)
    for position, token in enumerate(tokens):
        if position == num_shared and num_shared:
            chain = hash((chain, own))
        chain = hash((chain, token))
        content.append(chain)
    return content


@dataclass(eq=False)
class Client:
    """A request as far as the cache is concerned."""

    namespace: Namespace
    tokens: list[int]
    lease: Lease
    computed: int
    """Leading tokens whose KV lies in its pages; set when the copy was done."""
    copy: PageCopy | None
    num_shared: int = 0
    """Leading tokens of a shared prefix, in the namespace of all salts."""

    def content(self, stop: int | None = None) -> list[int]:
        """The KV content of its tokens up to `stop`."""
        return kv_of(self.namespace, self.tokens[:stop], self.num_shared)


@dataclass
class CheckedCache:
    """The cache under test, the memory it manages, and what the cache ought to hold.

    Copies are done as late as the contract allows, so that a source given up early shows.
    """

    cache: KVCacheManager
    clients: list[Client] = field(default_factory=list)
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    """The KV of the last token of every prefix that can be reused."""
    shared: list[list[int]] = field(default_factory=list)
    """Prefixes that all salts share."""
    loans: list[tuple[Loan, list[int]]] = field(default_factory=list)
    """What is lent, and the KV that its pages must keep."""
    now: float = 0.0

    def share(self, tokens: Sequence[int]) -> None:
        """Compute a prefix and share it."""
        self.serve(tokens)
        num_shared = self.cache.share(NAMESPACES[0], tokens)
        unit = math.lcm(self.cache.page_size, self.cache.block_tokens or 1)
        assert num_shared == len(tokens) // unit * unit == self.cache.share(NAMESPACES[0], tokens)
        self.shared.append(list(tokens[:num_shared]))
        self.check()

    def shared_pages(self) -> set[int]:
        """The pages of shared prefixes."""
        return {page for end in self.shared_ends() for page in self.cache.tree.table(end)}

    def shared_ends(self) -> set[Node]:
        """The nodes in which shared prefixes end."""
        tree, ends = self.cache.tree, set[Node]()
        for prefix in filter(None, self.shared):
            node, length = tree.walk(tree.roots[NAMESPACES[0]], prefix, len(prefix))
            assert length == node.end == len(prefix)
            ends.add(node)
        return ends

    def num_shared(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """By brute force: the tokens that a request has of the longest shared prefix."""
        if namespace.model != "m" or namespace.adapter or not namespace.salt:
            return 0
        fitting = (
            prefix for prefix in self.shared if prefix == list(tokens[: len(prefix)]) and len(prefix) < len(tokens)
        )
        return max(map(len, fitting), default=0)

    # What clients do

    def admit(self, namespace: Namespace, tokens: list[int], *, drop_partial: bool = False) -> Client | None:
        """Match, lock and extend to one token more than was found; None when there is no room."""
        self.now += 1
        cache, wanted = self.cache, self.longest_held(namespace, tokens)
        assert cache.peek(namespace, tokens) == wanted
        match = cache.match(namespace, tokens, self.now)
        assert match.length == wanted
        lease = cache.lock(match)
        assert lease.num_cached == wanted
        self.check()
        if drop_partial:
            cache.drop_partial(lease)
            assert lease.num_cached == wanted // cache.page_size * cache.page_size
        num_shared = self.num_shared(namespace, tokens)
        client = Client(namespace, tokens, lease, lease.num_cached, None, num_shared)
        assert lease.num_cached >= num_shared
        if not self.extend(client, lease.num_cached + 1):
            cache.finish(lease, [], self.now)
            return None
        if client.copy is not None:
            client.computed -= client.copy.num_tokens
        cache.record_admission(len(tokens), lease.num_cached, recompute=False)
        self.clients.append(client)
        return client

    def extend(self, client: Client, num_tokens: int) -> bool:
        """Extend, and check that it either did it all or nothing."""
        cache, before = self.cache, self.cache.account()
        needed = cache.pages_needed(client.lease, num_tokens)
        evicted = cache.stats.evicted_pages
        try:
            copies = cache.extend(client.lease, num_tokens)
        except OutOfPages:
            assert needed > cache.available and cache.account() == before
            return False
        assert needed <= before.free + before.evictable
        assert cache.account().private == before.private + needed
        if cache.stats.evicted_pages > evicted:
            assert cache.stats.evicted_pages - evicted - (needed - before.free) in (0, 1)
            self.forget_evicted()
        assert len(copies) <= 1
        if copies:
            client.copy = copies[0]
        return True

    def finish_copy(self, client: Client) -> None:
        """Do the copy as late as it may be done: right before its source is released."""
        if client.copy is None:
            return
        source, target, num_tokens = client.copy
        for slot in range(num_tokens):
            self.memory[target, slot] = self.memory[source, slot]
        self.cache.release_copy(client.lease)
        self.cache.release_copy(client.lease)
        client.copy, client.computed = None, client.computed + num_tokens

    def compute(self, client: Client, num_tokens: int) -> None:
        """Write the KV of the next tokens, if there are so many and there is room. A fork gets its copy first."""
        if client.lease.partial:
            self.extend(client, client.lease.num_cached + 1)
            return
        self.finish_copy(client)
        stop = min(client.computed + num_tokens, len(client.tokens))
        if not self.extend(client, stop):
            return
        content = client.content(stop)
        for position in range(client.computed, stop):
            self.memory[self.place(client.lease.pages, position)] = content[position]
        client.computed = stop

    def insert(self, client: Client, num_tokens: int) -> None:
        """Insert the first tokens that were computed."""
        self.now += 1
        self._insert(client, num_tokens, finish=False)

    def fork(self, client: Client, num_tokens: int) -> Client:
        """A second client goes on from the first tokens that were computed."""
        self.now += 1
        tokens = client.tokens[: min(num_tokens, client.computed)]
        before, copied = self.cache.account(), self.cache.stats.copied_pages
        lease = self._hold(client, tokens, lambda: self.cache.fork(client.lease, tokens, self.now))
        after = self.cache.account()
        assert after.private + after.locked <= before.total - before.free
        assert after.free >= before.free and self.cache.stats.copied_pages == copied
        num_shared = client.num_shared if len(tokens) >= client.num_shared else 0
        assert lease.num_cached == len(tokens) or self.is_copying or num_shared < client.num_shared
        assert lease.pages == client.lease.pages[: lease.num_cached // self.cache.page_size]
        computed = lease.num_cached - lease.partial
        fork = Client(client.namespace, tokens, lease, computed, None, num_shared)
        self.clients.append(fork)
        return fork

    def finish(self, client: Client, num_tokens: int) -> None:
        """Finish, keeping the first tokens that were computed."""
        self.now += 1
        self.clients.remove(client)
        self._insert(client, num_tokens, finish=True)

    def lend(self, namespace: Namespace, tokens: list[int]) -> None:
        """Lend the whole pages that are held of `tokens`, which nobody else may notice."""
        continued = [*tokens, 99]
        length = self.longest_held(namespace, continued) // self.cache.page_size * self.cache.page_size
        stats, leaf = self.cache.stats.copy(), self.cache.tree.next_to_go()
        uses = {node: (node.hits, node.last_access) for node, _ in self.paths()}
        loan = self.cache.lend(namespace, tokens)
        assert self.cache.stats == stats
        assert all((node.hits, node.last_access) == use for node, use in uses.items())
        assert leaf is None or leaf.is_locked or self.cache.tree.next_to_go() is leaf
        assert (0 if loan is None else len(loan.pages) * self.cache.page_size) == length
        if loan is not None:
            self.loans.append((loan, kv_of(namespace, tokens, self.num_shared(namespace, continued))[:length]))

    def take_back(self, number: int) -> None:
        """End a loan."""
        loan, _ = self.loans.pop(number)
        self.cache.take_back(loan)

    def _insert(self, client: Client, num_tokens: int, *, finish: bool) -> None:
        tokens = client.tokens[: min(num_tokens, client.computed)]
        act = self.cache.finish if finish else self.cache.insert
        self._hold(client, tokens, lambda: act(client.lease, tokens, self.now))

    def _hold(self, client: Client, tokens: list[int], act: Callable[[], T]) -> T:
        """Do what should make `tokens` reusable."""
        inserted, is_copying = self.cache.stats.inserted_tokens, self.is_copying
        result = act()
        if self.has_prefix_cache:
            content = client.content(len(tokens))
            if is_copying:  # It may be put off then, but not done by halves.
                present = {kv for _, held in self.paths() for kv in held}
                content = list(itertools.takewhile(present.__contains__, content))
            new = set(content) - self.held
            assert self.cache.stats.inserted_tokens - inserted == len(new)
            self.held |= new
        return result

    @property
    def is_copying(self) -> bool:
        """Whether the source of a copy is held for any client."""
        return any(client.lease.source is not None for client in self.clients)

    @property
    def has_prefix_cache(self) -> bool:
        """Whether anything can be found."""
        return self.cache.finds_prefixes

    # Whole stories, for tests that are about something else

    def start(self, tokens: Sequence[int], namespace: Namespace = NAMESPACES[0]) -> Client:
        """Start a request that has all of `tokens` computed, and nothing inserted yet."""
        client = self.admit(namespace, list(tokens))
        assert client is not None, "no room"
        self.compute(client, len(client.tokens))
        assert client.computed == len(client.tokens), "no room"
        self.check()
        return client

    def continue_with(self, client: Client, tokens: Sequence[int]) -> None:
        """The request generates `tokens`, and their KV is computed."""
        client.tokens.extend(tokens)
        self.compute(client, len(tokens))
        self.check()

    def end(self, client: Client) -> None:
        """The request finishes with all its KV kept."""
        self.finish(client, client.computed)
        self.check()
        self.check_locks()

    def serve(self, tokens: Sequence[int], namespace: Namespace = NAMESPACES[0]) -> int:
        """Run a request from arrival to end, and return how many tokens it found."""
        client = self.start(tokens, namespace)
        found = client.lease.num_cached
        self.end(client)
        return found

    # What must be true

    def place(self, pages: Sequence[int], position: int) -> tuple[int, int]:
        """Page and slot of a position."""
        return pages[position // self.cache.page_size], position % self.cache.page_size

    def longest_held(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """By brute force: the longest held prefix that leaves a token to compute."""
        content = kv_of(namespace, tokens, self.num_shared(namespace, tokens))[:-1]
        return max((length + 1 for length, kv in enumerate(content) if kv in self.held), default=0)

    def forget_evicted(self) -> None:
        """After an eviction, what is left is what may be found; nothing may have come up that was not there."""
        if not self.has_prefix_cache:
            return
        present = {kv for _, content in self.paths() for kv in content}
        assert present <= self.held
        self.held = present

    def paths(self) -> Iterator[tuple[Node, list[int]]]:
        """Every node of the tree with the KV content that its path stands for."""
        for root in self.cache.tree.roots.values():
            stack: list[tuple[Node, list[int], int]] = [(root, [], 0)]
            while stack:
                node, tokens, num_shared = stack.pop()
                tokens = tokens + list(node.tokens)
                yield node, kv_of(node.namespace, tokens, num_shared)
                stack.extend((child, tokens, num_shared) for child in node.children.values())
                stack.extend((gate, tokens, len(tokens)) for gate in (node.gates or {}).values())

    def check(self) -> None:
        """Check all that must be true after every operation."""
        account = self.cache.account()
        assert account.total == self.cache.num_pages
        assert self.cache.available == account.free + account.evictable
        nodes = list(self.paths())
        if self.has_prefix_cache:
            assert {kv for _, content in nodes for kv in content} == self.held
        else:
            assert account.evictable == 0
        for node, content in nodes:
            self.check_node(node)
            self.check_tails(node)
            pages = self.cache.tree.table(node)
            for position, kv in enumerate(content):
                assert self.memory[self.place(pages, position)] == kv
        for client in self.clients:
            self.check_client(client)
        for loan, lent in self.loans:
            assert [self.memory[self.place(loan.pages, position)] for position in range(len(lent))] == lent
        self.check_pages([node for node, _ in nodes])

    def check_client(self, client: Client) -> None:
        """The client's table leads to its own KV, and the pages that it shares are the tree's."""
        lease, page_size = client.lease, self.cache.page_size
        assert lease.node is not None and lease.num_shared == -(-lease.node.end // page_size)
        assert lease.pages[: lease.num_shared] == self.cache.tree.table(lease.node)
        content = client.content()
        for position in range(client.computed):
            assert self.memory[self.place(lease.pages, position)] == content[position]
        if client.lease.partial:
            assert lease.source is not None
            source = self.cache.tree.tail_page(lease.source)
            assert self.memory[source, lease.partial - 1] == content[lease.num_cached - 1]
        if client.copy is not None:
            assert self.memory[client.copy.source, client.copy.num_tokens - 1] == content[lease.num_cached - 1]

    def check_tails(self, node: Node) -> None:
        """Check that a page in which an inner node ends is one that a client writes on in or copies."""
        slot, inside = divmod(node.end, self.cache.page_size)
        if inside and node.children and not any(child.first_slot > slot for child in node.children.values()):
            is_held = node.pins > sum(child.is_locked for child in node.children.values())
            assert is_held or self.is_copying

    def check_node(self, node: Node) -> None:
        """Check the shape of the tree, its locks and its queue."""
        page_size = self.cache.page_size
        is_gate = node.parent is not None and node.parent.gates and node in node.parent.gates.values()
        assert node.tokens or node.parent is None or is_gate
        for namespace, gate in (node.gates or {}).items():
            assert node.end % page_size == 0 and gate.parent is node and gate.namespace == namespace
            assert not gate.tokens and gate.start == node.end and (gate.children or gate.pins)
        assert node.end == node.start + len(node.tokens)
        assert node.first_slot in (node.start // page_size, -(-node.start // page_size))
        assert node.first_slot + len(node.pages) == -(-node.end // page_size)
        for token, child in node.children.items():
            assert child.tokens[0] == token and child.parent is node and child.start == node.end
        continuing = [child for child in node.children.values() if child.first_slot * page_size > child.start]
        assert continuing == ([] if node.continuation is None else [node.continuation])
        assert node.queued or not node.is_evictable
        assert node.tokens or node.children or node.pins

    def check_pages(self, nodes: list[Node]) -> None:
        """Check that each page is in one place, and that the counters say how many are where."""
        account = self.cache.account()
        evictable = [page for node in nodes if not node.pins for page in node.pages]
        locked = [page for node in nodes if node.pins for page in node.pages]
        free = self.cache.pool.free_pages
        counted = account.free, account.evictable, account.locked + account.lent
        assert (len(free), len(evictable), len(locked)) == counted
        owned = [*free, *evictable, *locked]
        assert len(set(owned)) == len(owned)
        private = [page for c in self.clients for page in c.lease.pages[c.lease.num_shared :]]
        assert not set(owned) & set(private) and len(set(private)) == len(private)

    def check_locks(self) -> None:
        """Check that exactly the paths of clients and shared prefixes are locked. Call between operations only."""
        shared = self.shared_ends()
        pins: dict[Node, int] = dict.fromkeys(shared, 1)
        for client in self.clients:
            for node in (client.lease.node, client.lease.source):
                if node is not None:
                    pins[node] = pins.get(node, 0) + 1
        for loan, _ in self.loans:
            pins[loan.node] = pins.get(loan.node, 0) + 1
        for node, _ in self.paths():
            children = [*node.children.values(), *(node.gates or {}).values()]
            locked_children = sum(child.is_locked for child in children)
            assert node.pins == pins.get(node, 0) + locked_children
            assert node.copying == sum(client.lease.source is node for client in self.clients)
        for client in self.clients:
            assert client.lease.node is not None
            others = [c.lease.node for c in self.clients if c is not client]
            others += [*(c.lease.source for c in self.clients), *shared]
            others += [loan.node for loan, _ in self.loans]
            above = {node for other in others if other is not None for node in self.cache.tree.path(other)}
            ends = [node.end for node in self.cache.tree.path(client.lease.node) if node in above]
            assert self.cache.shared_tokens(client.lease) == max(ends, default=0)
        held: list[Node | None] = [*shared]
        for client in self.clients:
            held += [client.lease.node, client.lease.source]
        used = {node for end in held if end is not None for node in self.cache.tree.path(end)}
        lent = sum(len(node.pages) for node, _ in self.paths() if node.pins and node not in used)
        assert self.cache.account().lent == lent
        private = sum(len(c.lease.pages) - c.lease.num_shared for c in self.clients)
        assert self.cache.account().private == private


def checked_cache(num_pages: int = 64, page_size: int = 4) -> CheckedCache:
    """An empty cache with the default eviction."""
    return CheckedCache(KVCacheManager(num_pages, page_size))
