"""The KV cache as the scheduler uses it: match, lock, extend, insert, finish.

match ──▶ lock ──▶ extend ──▶ [ step computes KV ] ──▶ insert ──▶ extend ──▶ ... ──▶ finish
read       Lease    pages                             reusable by others             all given back
                                                        └─ fork: a second Lease that continues from there
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cache.eviction import EvictionStrategy, eviction_strategy
from cache.figures.accounting import CacheStats, PageAccount
from cache.figures.page_ages import PageAges
from cache.insertion import insert
from cache.lease import CachedPrefix, Lease, Match, PageCopy
from cache.news.block_events import BlockEvents
from cache.news.block_record import BlockRecord
from cache.news.prefix_log import PrefixLog
from cache.node import Namespace, Node
from cache.page_pool import OutOfPages, PagePool
from cache.radix_tree import RadixTree
from cache.resume.lease_state import LeaseState
from cache.resume.resume_points import ResumePoints, deepest_resume_point
from cache.resume.snapshots import Snapshots, StateAccount
from cache.resume.windows import LeaseWindow, Window, WindowTails
from cache.scratch import Scratch
from cache.shared.shared_in_tree import SharedInTree
from cache.shared.shared_prefixes import own_namespace
from cache.tiers.loans import ANY_TOKEN, Loan, Loans

MAX_PAGE_SIZE = 256


class KVCacheManager:
    """Owns every page of one KV memory. Not thread-safe: it belongs to the engine loop.

    Reuse is exact to the token: whole pages are shared, and the lease gets a copy of a page in which a match ends.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        eviction: str | EvictionStrategy = "lru",
        prefix_cache: bool = True,
        block_tokens: int | None = None,
        num_state_slots: int = 0,
        window: Window | None = None,
    ) -> None:
        """`page_size` is in tokens. Without `prefix_cache` no match is found; only forks share pages, while they
        live.

        With `block_tokens`, which need not equal the page size, `prefix_log` reports which blocks are held.
        With `num_state_slots`, the model has recurrent states: leases have one each, matches end at snapshots.
        With `window`, its layers with a window have pages of their own: matches end at tails. Not both.
        """
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"page_size must be between 1 and {MAX_PAGE_SIZE} tokens, got {page_size}")
        self.num_pages, self.page_size, self.block_tokens = num_pages, page_size, block_tokens
        self.stats = CacheStats()
        self._prefix_cache = prefix_cache
        self.page_ages = PageAges(num_pages)
        """Ages of evicted pages; recorded where `extend` is given the time."""
        self.on_evict: Callable[[Node], None] = lambda node: None
        """Called with each node whose pages are taken to make room, while it is still in the tree: their KV stays
        readable for the step that is being planned."""
        self.pool = PagePool(num_pages)
        """The pages that hold nothing."""
        record = BlockRecord(block_tokens) if block_tokens else None
        self.prefix_log: PrefixLog | None = record.log if record is not None else None
        """Feed of stored and evicted block hashes, for routers; None without `block_tokens`."""
        self.snapshots = Snapshots(num_state_slots) if num_state_slots else None
        """Slots for recurrent states; None in a model without any."""
        self.tails = None if window is None else WindowTails(window, page_size, self.pool)
        """Pages of layers with a window; None where they have none of their own."""
        self.resume_points: ResumePoints | None = self.snapshots or self.tails
        """The points at which requests can resume; None in models that can resume after any cached token."""
        record = record if prefix_cache else None
        self.tree = RadixTree(page_size, eviction_strategy(eviction), record, self.resume_points)
        """The prefixes that are held, with their pages."""
        self._loans = Loans(self.tree)
        self._num_private = self._num_groups = 0
        self._shared = SharedInTree(self.tree, block_tokens, self.resume_points)
        self.num_shared_pages = 0
        """Pages of prefixes that all namespaces share, which are locked for good."""

    def follow_blocks(self, include_salted: bool = False) -> BlockEvents:
        """Return the events of all blocks from now on, for other programs. Call it while nothing is held.

        Raises ValueError where no blocks are reported.
        """
        if self.prefix_log is None or not self._prefix_cache:
            raise ValueError("blocks are reported by a prefix cache with block_tokens")
        self.prefix_log.events = BlockEvents(self.block_tokens or 1, include_salted)
        return self.prefix_log.events

    def state_account(self) -> StateAccount:
        """Count the slots for recurrent states by what they hold; none without recurrent layers. O(1)."""
        return StateAccount(0, 0, 0, 0) if self.snapshots is None else self.snapshots.account()

    @property
    def finds_prefixes(self) -> bool:
        """Whether requests find what others have computed."""
        return self._prefix_cache

    @property
    def available(self) -> int:
        """Number of pages that `extend` can allocate: free ones, those of unlocked nodes and of tails. O(1)."""
        in_tails = 0 if self.tails is None else self.tails.evictable_pages
        return self.pool.num_free + self.tree.evictable_pages + in_tails

    def account(self) -> PageAccount:
        """Count the pages in each state. The invariant is that they add up to `num_pages`. O(1) without loans."""
        tree, tails, lent = self.tree, self.tails, self._loans.count_pages()
        evictable, locked, private = tree.evictable_pages, tree.locked_pages - lent, self._num_private
        if tails is not None:
            evictable += tails.evictable_pages
            locked, private = locked + tails.locked_pages, private + tails.private_pages
        return PageAccount(self.pool.num_free, evictable, locked, private, lent)

    def peek(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """Count the tokens that a match would find; change nothing, not even the eviction order. O(result)."""
        return self.find(namespace, tokens).num_reusable

    def find(self, namespace: Namespace, tokens: Sequence[int]) -> CachedPrefix:
        """Count the tokens that a match would find, and those whose KV is held, as `peek` does."""
        node, num_held = self._shared.find(namespace, tokens)
        return CachedPrefix(self._reusable(node, num_held)[1], num_held)

    def block_hashes(self, namespace: Namespace, tokens: Sequence[int]) -> list[int]:
        """Return the hashes of the whole blocks of `tokens`, as `prefix_log` names them. O(tokens)."""
        return self._shared.chain(namespace, tokens)

    def match(self, namespace: Namespace, tokens: Sequence[int], now: float) -> Match:
        """Return the longest held prefix of `tokens`, at most len(tokens) - 1 so that one token is left to
        compute.

        Splits the nodes in which the match and its whole pages end, and touches the path. O(tokens in the nodes
        passed).
        """
        node, num_held = self._shared.find(namespace, tokens)
        return self._match(namespace, *self._reusable(node, num_held), num_held, now)

    def match_bare(self, namespace: Namespace, tokens: Sequence[int], most: int, now: float) -> Match:
        """Return what `match` does, up to `most` tokens, for a request that brings its own resume point."""
        node, num_held = self._shared.find(namespace, tokens)
        return replace(self._match(namespace, node, min(num_held, most), num_held, now), is_bare=True)

    def _match(self, namespace: Namespace, node: Node | None, length: int, num_held: int, now: float) -> Match:
        if node is None or not length:
            return Match(namespace, 0, num_held=num_held)
        partial = length % self.page_size
        node = self.tree.cut(node, length)
        self.tree.touch(node, now)
        source = node if partial else None
        aligned = length - partial
        whole = self.tree.cut(node, aligned) if aligned else None
        return Match(namespace, length, partial, whole, source, num_held)

    def lock(self, match: Match, *, priority: int = 0) -> Lease:
        """Hold what was matched. Lock before any allocation, which may evict: locked nodes are safe from eviction.

        The page in which the match ends is locked on its own until `release_copy`, so `available` shrinks by the
        whole match: check for room after locking. With recurrent states, the lease's `state` is None if there is
        no slot for it. Raises ValueError when the tree changed since the match.
        """
        tree = self.tree
        for node, end in ((match.node, match.aligned), (match.source, match.length)):
            if node is not None and (node.parent is None or node.end != end):
                raise ValueError("the match is out of date: match again and lock before any other change")
        held = match.node or tree.root(self._own(match.namespace))
        if match.node is not None and held.namespace != match.namespace:
            held = tree.gate(held, match.namespace)
        tree.lock(held)
        if match.source is not None:
            tree.lock(match.source)
            match.source.copying += 1
        pages = tree.table(held)
        lease = Lease(pages, len(pages), match.length, priority, held, match.source, match.partial)
        origin = None if match.is_bare else match.source or match.node
        if self.snapshots is not None:
            lease.state = LeaseState.begin(self.snapshots, origin)
        if self.tails is not None:
            lease.state = lease.window = LeaseWindow(self.tails, origin)
        return lease

    def lend(self, namespace: Namespace, tokens: Sequence[int]) -> Loan | None:
        """Keep the whole pages of the longest held prefix of `tokens` as they are until `take_back`; None if there
        is none. This is no use of them (see `loans`).
        """
        return self._loans.lend(*self._shared.find(namespace, [*tokens, ANY_TOKEN]))

    def take_back(self, loan: Loan) -> None:
        """End a loan, exactly once."""
        self._unlock(self._loans.take_back(loan))

    def share(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """Let all namespaces of the model find `tokens`, which are held in `namespace`, the one without a salt.

        They are locked for good. Returns how many are shared: whole blocks and whole pages. Call it before other
        namespaces have prompts that begin with `tokens`: what these hold of them is found no more. Raises
        ValueError when the tokens are not held, or in another namespace.
        """
        if not self._prefix_cache or namespace != own_namespace(namespace):
            raise ValueError("prefixes are shared with a prefix cache, in a namespace without a salt")
        num_tokens = self._shared.share(namespace, tokens)
        self.num_shared_pages = self._shared.count_pages()
        self.num_shared_pages += 0 if self.tails is None else self.tails.pinned_pages
        return num_tokens

    def shared_tokens(self, lease: Lease) -> int:
        """Count the leading tokens that another lease or a pending copy holds as well. O(depth).

        The tokens after them may be evicted once this lease ends.
        """
        node = held_node(lease)
        while node.parent is not None and node.pins == 1:  # pinned by this lease, or by the child below
            node = node.parent
        return node.end

    def pages_needed(self, lease: Lease, num_tokens: int) -> int:
        """Count the pages that `extend` would allocate, including the page of the copy; for layers with a window,
        those of the chunk at which most of them are lacking.
        """
        held_node(lease)
        num_slots = -(-max(num_tokens, lease.num_cached) // self.page_size)
        rows = 0 if lease.window is None else lease.window.most_missing(num_slots)
        return max(num_slots - len(lease.pages), 0) + rows

    def pages_for(self, num_tokens: int) -> int:
        """Count the pages that a request of so many tokens needs at most."""
        num_slots = -(-num_tokens // self.page_size)
        return num_slots + (0 if self.tails is None else self.tails.window.pages_for(num_slots, self.page_size))

    def most_tokens(self, num_pages: int) -> int:
        """Return how many tokens fit into so many pages, however many of them one chunk computes."""
        if self.tails is not None:
            num_pages = self.tails.window.most_slots(num_pages, self.page_size)
        return num_pages * self.page_size

    def drop_partial(self, lease: Lease) -> None:
        """Give up the tokens that need a copy, and thereby its page. No-op without such tokens.

        Raises ValueError after `extend` has handed the copy out.
        """
        held_node(lease)
        if lease.source is None:
            return
        if not lease.partial:
            raise ValueError(
                "extend has returned the copy of the partial page already; drop_partial goes before it"
            )
        lease.num_cached -= lease.partial
        lease.partial = 0
        self._release_source(lease)

    def extend(
        self, lease: Lease, num_tokens: int, now: float | None = None, chunk: tuple[int, int] | None = None
    ) -> list[PageCopy]:
        """Make the page table cover `num_tokens` tokens, evicting as needed. O(k log n) for k new pages. Layers
        with a window get pages for the next `chunk` (start, end), all tokens for None, and give back those that it
        does not need.

        The first call returns the copy of a match that ends inside a page. Raises OutOfPages, with nothing
        else changed, when too few pages are available.
        """
        held, window = held_node(lease), lease.window
        needed = in_all = max(-(-max(num_tokens, lease.num_cached) // self.page_size) - len(lease.pages), 0)
        start, end = chunk or (0, num_tokens)
        if window is not None:
            window.give_back(start)
            in_all += window.pages_missing(-(-end // self.page_size))
        if in_all > self.available:
            raise OutOfPages(
                f"{in_all} pages wanted for {num_tokens} tokens, {self.available} of {self.num_pages} available"
            )
        if in_all > self.pool.num_free:
            self.evict(in_all - self.pool.num_free, now)
        num_before = len(lease.pages)
        copies = []
        if lease.partial and lease.source is not None:
            source = self.tree.tail_page(lease.source)
            lease.pages += self.pool.allocate(1)
            copies.append(PageCopy(source, lease.pages[-1], lease.partial))
            lease.partial = 0
            self.stats.copied_pages += 1
        lease.pages += self.pool.allocate(needed - len(copies))
        lease.capacity = len(lease.pages) * self.page_size
        if window is not None:
            window.grow(-(-end // self.page_size))
            lease.capacity = min(lease.capacity, window.num_slots * self.page_size)
        self._num_private += needed
        if now is not None:
            self.page_ages.taken(lease.pages[num_before:], now)
        if not lease.is_admitted:
            lease.is_admitted = True
            self.tree.record_use(lease.source or held, lease.priority)
        return copies

    def release_copy(self, lease: Lease) -> None:
        """Release the source of a finished copy that `extend` returned. Idempotent; no-op without a copy."""
        if lease.source is not None and not lease.partial:
            self._release_source(lease)

    def keep_states(self, lease: Lease, tokens: Sequence[int], num_tokens: int) -> None:
        """Give nodes the resume points of a chunk that a step has computed, up to the first `num_tokens` tokens,
        which are inserted. No-op in a model without them.
        """
        if lease.state is not None:
            lease.state.release_origin()
            for position, number in lease.state.take_kept(num_tokens):
                self._keep_resume_point(held_node(lease), tokens, position, number)

    def insert(self, lease: Lease, tokens: Sequence[int], now: float) -> None:
        """Make `tokens`, the request's leading tokens whose KV is computed, reusable while the request continues.

        The tree takes the lease's pages. Where it already has the same tokens, the page table is rewritten to the
        tree's pages and the duplicates are freed. The lock moves along; the lease may write on after `tokens`.
        O(tokens since the last insert). Raises ValueError when `tokens` are not what the pages can hold.
        """
        if self._prefix_cache:
            self._insert(lease, tokens, now)
        else:
            held_node(lease)

    def fork(self, lease: Lease, tokens: Sequence[int], now: float) -> Lease:
        """Return a second lease that continues after `tokens`, the first one's leading tokens with computed KV.

        The tokens enter the tree and both leases hold them: whole pages are shared, and the page they end in is
        copied when the new lease first extends, as after a match. `num_cached` tells how many of them it holds:
        all, unless a page that must change its owner is being copied, or they end within a shared prefix, where
        a salt has no tokens of its own: then none. O(pages + depth + tokens since the last insert).
        """
        self._insert(lease, tokens, now)
        tree, held = self.tree, held_node(lease)
        node, length = held, len(tokens)
        if length < tree.origin(held).end:
            root = tree.root(held.namespace)
            tree.lock(root)
            return Lease([], 0, 0, lease.priority, root, is_admitted=True)
        if length > held.end:
            node, length = tree.walk(held, tokens, length)
        partial = length % self.page_size
        aligned = length - partial
        source = tree.cut(node, length) if partial else None
        above = tree.cut(source or node, aligned) if aligned else tree.root(held.namespace)
        tree.lock(above)
        if source is not None:
            tree.lock(source)
            source.copying += 1
        pages = lease.pages[: aligned // self.page_size]
        return Lease(pages, len(pages), length, lease.priority, above, source, partial, is_admitted=True)

    def _insert(self, lease: Lease, tokens: Sequence[int], now: float) -> None:
        held = held_node(lease)
        if len(tokens) > len(lease.pages) * self.page_size:
            raise ValueError(
                f"{len(tokens)} tokens cannot lie in {len(lease.pages)} pages of {self.page_size} tokens"
            )
        if len(tokens) <= held.end:
            return
        if held.tokens and tokens[held.end - 1] != held.tokens[-1]:
            raise ValueError(
                f"the tokens must begin with those inserted before, but differ from them at {held.end - 1}"
            )
        num_shared = lease.num_shared
        self.stats.inserted_tokens += insert(self.tree, self.pool, lease, tokens, now)
        self._num_private -= lease.num_shared - num_shared
        self._free_surplus()

    def finish(self, lease: Lease, tokens: Sequence[int], now: float) -> None:
        """Insert `tokens` (may be empty, or fewer than were computed), give all pages back and end the lease.

        Every lease ends so, also of requests that were aborted, preempted (their tokens stay reusable while there
        is room), or locked and then not admitted.
        """
        self.insert(lease, tokens, now)
        held = held_node(lease)
        if lease.is_admitted:
            self.tree.touch(held, now)
        if lease.state is not None:
            for position, number in lease.state.end_at(len(tokens)):
                self._keep_resume_point(held, tokens, position, number)
            lease.state = lease.window = None
        if lease.source is not None:
            self._release_source(lease)
        self.pool.free(lease.pages[lease.num_shared :])
        self._num_private -= len(lease.pages) - lease.num_shared
        self._unlock(held)
        lease.node, lease.pages, lease.num_shared, lease.capacity = None, [], 0, 0

    def record_admission(
        self, query_tokens: int, hit_tokens: int, *, recompute: bool, host_tokens: int = 0
    ) -> None:
        """Count one admission with its hits (`CacheStats.admitted`). Hits are counted nowhere else."""
        self.stats.admitted(query_tokens, hit_tokens, host_tokens, recompute=recompute)

    def evict(self, num_pages: int, now: float | None = None) -> int:
        """Free up to `num_pages` pages of unlocked nodes in the strategy's order, and of tails that were not used
        for longer; return their number.
        """

        def watch(node: Node) -> None:
            if now is not None:
                self.page_ages.evicted(node.pages, node.last_access, now)
            if self._prefix_cache:
                self.on_evict(node)

        before = self.pool.num_free
        while (missing := num_pages - (self.pool.num_free - before)) > 0:
            leaf = self.tree.next_to_go()
            if self.tails is not None and self.tails.give_up_before(leaf):
                continue
            if leaf is None:
                break
            most = missing if self.tails is None else min(missing, max(1, len(leaf.pages)))
            self.pool.free(self.tree.evict(most, watch))
        freed = self.pool.num_free - before
        self.stats.evicted_pages += freed
        return freed

    def scratch(self) -> Scratch | None:
        """Return memory that is free until the next step is planned; None if requests hold all of it."""
        slot = None
        if self.snapshots is not None:
            if (slot := self.snapshots.take()) is None:
                return None
            self.snapshots.free(slot)
        if not self.pool.num_free and not self.evict(1):
            return None
        [page] = self.pool.allocate(1)
        self.pool.free([page])
        return Scratch(page, slot, 0 if self.tails is None else self.tails.window.num_groups)

    def eviction_age(self, now: float) -> float | None:
        """Return the seconds since the last use of what would be evicted next, which is what an allocation costs.

        None while pages are free; 0 when running requests hold everything. O(log n) amortised over uses.
        """
        if self.pool.num_free:
            return None
        node = self.tree.next_to_go()
        return 0.0 if node is None else max(now - node.last_access, 0.0)

    def reset(self) -> int:
        """Drop everything that no lease has locked; return the number of pages freed.

        A single lease can then get every page that is not in its table: where no other node continues in a page of
        its path, the tree does not hold that page twice.
        """
        before = self.pool.num_free
        self.pool.free(self.tree.evict())
        if self.tails is not None:
            self.tails.drop_all()
        freed = self.pool.num_free - before
        self.stats.reset_pages += freed
        return freed

    def _reusable(self, node: Node | None, length: int) -> tuple[Node | None, int]:
        """Return where a request can resume: at the deepest snapshot or tail, in models that need them."""
        if self.resume_points is None:
            return node, length
        node = deepest_resume_point(node, length)
        return node, 0 if node is None else node.end

    def _keep_resume_point(self, locked: Node, tokens: Sequence[int], position: int, number: int) -> None:
        """Let the node that ends at a position of `tokens` carry a resume point, where the tree has these tokens
        and they are not shared by all namespaces; else free it. `locked` is the node of a lease that has inserted
        its tokens.
        """
        assert self.resume_points is not None
        node, reached = (
            (locked, locked.end) if position <= locked.end else self.tree.walk(locked, tokens, position)
        )
        if self.tree.origin(node).end < position <= reached:
            self.resume_points.keep(self.tree.cut(node, position), number)
        else:
            self.resume_points.free(number)

    def _release_source(self, lease: Lease) -> None:
        assert lease.source is not None
        lease.source.copying -= 1
        self._unlock(lease.source)
        lease.source = None

    def _unlock(self, node: Node) -> None:
        self.tree.unlock(node)
        self._free_surplus()
        if not self._prefix_cache:  # No request can find pages that no lease of their group holds.
            self.pool.free(self.tree.evict())

    def _free_surplus(self) -> None:
        if self.tree.surplus:
            self.pool.free(self.tree.surplus)
            self.tree.surplus.clear()

    def _own(self, namespace: Namespace) -> Namespace:
        """Return the namespace of a new lease's tokens: its own, or one that only its forks share."""
        if self._prefix_cache:
            return namespace
        self._num_groups += 1
        return namespace._replace(group=self._num_groups)


def held_node(lease: Lease) -> Node:
    """Return the node that a lease holds. Raises ValueError for a finished lease."""
    if lease.node is None:
        raise ValueError("the lease is finished and holds nothing; lock a new match instead")
    return lease.node
