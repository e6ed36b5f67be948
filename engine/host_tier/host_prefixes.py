"""Evicted prefixes in host memory: chooses which pages are copied there, and back for a prompt.

    the device evicts a prefix that was used before ──▶ copied to the host in the step that takes its pages
                                                                         │ found once that step has ended
    a prompt begins with it ──▶ held ──▶ copied back in the prompt's first step, which computes the rest

Host memory keeps whole pages, also after they are copied back: if the device evicts them again, they need no copy.
A prefix that was used once is not worth a copy, because most prompts never return. In models that need resume
points, these are kept by the same rules (`host_resume_points`), and a prefix is of use only up to one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cache.lease import CachedPrefix, Lease
from cache.node import Namespace, Node
from cache.radix_tree import page_of, sequence
from cache.tiers.page_keys import PageKeys
from cache.tiers.page_tier import TierPage
from engine.host_tier.arriving_prefixes import ArrivingPrefixes
from engine.host_tier.host_pool import Copies, HostPool
from engine.host_tier.host_resume_points import HostResumePoint, HostResumePoints
from engine.host_tier.lower_tier import NO_LOWER_TIER, LowerTier
from engine.host_tier.peers import KVPeers
from engine.values.request import Request


class _Held(NamedTuple):
    """The pages that a request will copy back."""

    first: int
    """The slot of its page table that the first page fills."""
    pages: list[TierPage]
    end: HostResumePoint | None
    """The resume point, in a model that needs one."""
    at_end: list[TierPage]
    """The pages of the resume point."""


class HostPrefixes:
    """Decides which evicted pages are copied to the host, and which a prompt copies back."""

    def __init__(
        self,
        pool: HostPool,
        page_size: int,
        min_uses: int = 2,
        block_tokens: int = 0,
        lower: LowerTier = NO_LOWER_TIER,
        hashes: Callable[[Namespace, Sequence[int]], Sequence[int]] | None = None,
        ends: HostResumePoints | None = None,
    ) -> None:
        """A page is kept if at least `min_uses` requests have used it, including the one that computed it. Kept
        pages are also written to `lower` and loaded from there.

        Routers are notified of the pages here if a page is one or more blocks of `block_tokens` tokens; 0: they
        are not. `hashes` returns the hashes of a prompt's blocks; without it, routers learn of pages from
        elsewhere when the device evicts them. `ends`: the resume points that prefixes need; None for none.
        """
        if min_uses < 1:
            raise ValueError(f"every prefix has at least 1 use, so min_uses must be at least 1, got {min_uses}")
        self._pool, self._tier = pool, pool.tier
        self._page_size = page_size
        self._min_uses = min_uses
        self._block_tokens = block_tokens if block_tokens and page_size % block_tokens == 0 else 0
        self._hashes, self._resume_points = hashes, ends
        self._arriving = ArrivingPrefixes(lower, pool, page_size)
        self._outgoing = Copies([], [])
        self._keys: dict[str, PageKeys] = {}
        self._held: dict[str, _Held] = {}
        self._being_read: list[TierPage] = []

    # --- to the host ---------------------------------------------------------------------------------------

    def on_evict(self, node: Node) -> None:
        """Handle the eviction of all pages of a node, which is still in the device's tree. O(depth + its tokens).

        A page that nodes above begin and this one fills is copied too, because the pages after it could not be
        found without it. The next `take_copies` returns the copies.
        """
        self.on_give_up(node)
        first, num_whole = node.start // self._page_size, node.end // self._page_size
        if not self._is_worth_keeping(node) or first >= num_whole:
            return
        keys = PageKeys(node.namespace, sequence(node), self._page_size, first)
        for slot in range(num_whole - 1, first - 1, -1):  # so that the end of a prefix counts as older
            if self._tier.has(keys[slot]):
                self._tier.describe(keys[slot], self._blocks_in(node, slot))
            elif self._pool.available:
                (host,) = self._pool.take(1)
                self._tier.add(keys[slot], host, self._blocks_in(node, slot))
                self._outgoing.pages.append((page_of(node, slot), host))

    def on_give_up(self, node: Node) -> None:
        """Handle the loss of a node's resume point on the device. In host memory it counts as older than the pages
        before it, because other prefixes use those. O(its tokens and those above it).
        """
        if self._resume_points is None or node.resume_point is None or not self._is_worth_keeping(node):
            return
        tokens = sequence(node)
        keys = PageKeys(node.namespace, tokens, self._page_size, self._resume_points.first_key(node.end))
        self._outgoing.add(self._resume_points.keep(node, keys, tokens))

    def _is_worth_keeping(self, node: Node) -> bool:
        return self._pool.num_pages > 0 and node.hits + 1 >= self._min_uses

    def _blocks_in(self, node: Node, slot: int) -> list[int]:
        """Return the hashes of the blocks in a page that a node fills; nodes above may have begun it."""
        if not self._block_tokens:
            return []
        size, begin = self._block_tokens, slot * self._page_size
        blocks: list[int] = []
        step: Node | None = node
        while step is not None and step.end > begin:
            first = max(begin // size - step.start // size, 0)
            last = (begin + self._page_size) // size - step.start // size
            blocks = step.blocks[first:last] + blocks
            step = step.parent
        return blocks

    def take_copies(self) -> Copies:
        """Return the copies to the host that the step being planned has to make first."""
        copies, self._outgoing = self._outgoing, Copies([], [])
        return copies

    def settle(self, hosts: Iterable[int]) -> None:
        """Note that a step has made its copies to these pages of the host."""
        found, unwanted = self._tier.settle(hosts)
        self._pool.free(unwanted)
        self._arriving.save(found)

    def drop(self, hosts: Iterable[int]) -> None:
        """Note that a step failed and perhaps has not made its copies."""
        self._pool.free(self._tier.drop(hosts))

    def reset(self) -> int:
        """Forget all pages that no request is about to read; return the number of pages that this freed."""
        self._arriving.reset()
        pages = self._tier.clear()
        self._pool.free(pages)
        return len(pages)

    # --- to the device -------------------------------------------------------------------------------------

    def fetch(self, request: Request, num_found: int, tokens_per_second: float, now: float) -> None:
        """Begin to load pages of a new request from below host memory, or from its source. The device has its
        first `num_found` tokens.

        Do not call it while a step is being planned.
        """
        first, last = num_found // self._page_size, (len(request.reusable) - 1) // self._page_size
        if first < last and self._pool.num_pages:
            keys = self._keys_of(request, first)
            self._arriving.fetch(
                request, keys, first, last, tokens_per_second, now, lambda pages: self._blocks_of(request, pages)
            )

    def _blocks_of(self, request: Request, pages: Sequence[int]) -> list[Sequence[int]]:
        """Return the hashes of the blocks in each of some pages of a prompt. O(tokens) if there are pages."""
        if self._hashes is None or not self._block_tokens or not pages:
            return [()] * len(pages)
        chain = self._hashes(request.namespace, request.tokens[: (max(pages) + 1) * self._page_size])
        in_page = self._page_size // self._block_tokens
        return [chain[page * in_page : (page + 1) * in_page] for page in pages]

    def is_awaited(self, request_id: str, now: float) -> bool:
        """Whether a request waits for pages that `fetch` began to load."""
        return self._arriving.is_awaited(request_id, now)

    def num_coming(self, request_id: str) -> int:
        """Return how many leading tokens of a request have KV once the pages of `fetch` have arrived."""
        return self._arriving.num_coming(request_id)

    def reach(self, request: Request, prefix: CachedPrefix, tokens_per_second: float) -> int:
        """Return after how many leading tokens a waiting request can resume, given the device's prefix.

        Tokens that are faster to compute, at `tokens_per_second` (0: not known), than to copy do not count.
        """
        first, last = prefix.num_held // self._page_size, (len(request.reusable) - 1) // self._page_size
        if not self._tier.num_pages or (first >= last and self._resume_points is None):
            return prefix.num_reusable
        if self._resume_points is None:
            num_pages = self._tier.count(self._keys_of(request, first), first, last)
            reached = (first + num_pages) * self._page_size
        else:
            end = self._end(request, prefix)
            if end is None:
                return prefix.num_reusable
            reached = end.num_tokens
            num_pages = self._pool.state_pages + len(end.keys) + max(0, reached // self._page_size - first)
        saved = (reached - prefix.num_reusable) / (tokens_per_second or 1e-9)
        return reached if num_pages and num_pages * self._pool.page_seconds < saved else prefix.num_reusable

    def _end(self, request: Request, prefix: CachedPrefix) -> HostResumePoint | None:
        """Return the deepest resume point of a request in host memory."""
        assert self._resume_points is not None
        tokens, first = request.reusable, prefix.num_held // self._page_size
        keys = self._keys_of(request, self._resume_points.first_key(prefix.num_reusable))
        count = self._tier.count(keys, first, (len(tokens) - 1) // self._page_size)
        reached = max(prefix.num_held, (first + count) * self._page_size)
        return self._resume_points.deepest(keys, tokens, prefix.num_reusable, reached)

    def hold(self, request: Request, prefix: CachedPrefix, reached: int) -> None:
        """Keep the pages that `reach` promised to a request, until they are copied or the request is forgotten."""
        first, stop = prefix.num_held // self._page_size, reached // self._page_size
        end = None if self._resume_points is None else self._end(request, prefix)
        at_end = [] if end is None else self._tier.pin(end.keys, 0, len(end.keys))
        pages = self._tier.pin(self._keys_of(request, first), first, stop)
        self._held[request.request_id] = _Held(first, pages, end, at_end)

    @property
    def requests(self) -> set[str]:
        """The requests that hold pages, wait for some, or have looked for them."""
        return {*self._held, *self._keys, *self._arriving.requests}

    def holds(self, request_id: str) -> bool:
        """Whether pages are kept for a request."""
        return request_id in self._held

    def load(self, request_id: str, lease: Lease) -> Copies:
        """Return the copies to the device for a request that continues in the pages of its lease."""
        held = self._held.pop(request_id, None)
        self._keys.pop(request_id, None)
        copies = Copies([], [])
        if held is None:
            return copies
        self._being_read += [*held.pages, *held.at_end]
        copies.pages.extend((lease.pages[held.first + index], page.page) for index, page in enumerate(held.pages))
        if held.end is not None:
            assert self._resume_points is not None
            hosts = [host for page in held.at_end for host in page.pages]
            copies.add(self._resume_points.restore(lease, held.end.num_tokens, hosts))
        return copies

    def forget(self, request_id: str) -> None:
        """Release the pages held for a request that has ended or was preempted. Idempotent."""
        self._arriving.forget(request_id)
        self._keys.pop(request_id, None)
        self.release(request_id)

    def release(self, request_id: str) -> None:
        """Release the pages held for a request that does not start yet. Idempotent."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._tier.unpin([*held.pages, *held.at_end])

    def begin_step(self) -> None:
        """Begin to plan a step. It may overwrite pages that earlier steps read, because it copies after them."""
        self.take_in_transfers()
        self._tier.unpin(self._being_read)
        self._being_read = []

    def connect(self, peers: KVPeers) -> None:
        """Fetch from other engines through `peers` from now on."""
        self._arriving.peers = peers

    def take_in_transfers(self) -> None:
        """Record the pages that a lower tier has loaded and saved, and those that other engines sent."""
        self._arriving.take_in()

    def _keys_of(self, request: Request, first: int) -> PageKeys:
        keys = self._keys.get(request.request_id)
        if keys is None or first < keys.first:
            keys = PageKeys(request.namespace, request.tokens, self._page_size, first)
            self._keys[request.request_id] = keys
        return keys
