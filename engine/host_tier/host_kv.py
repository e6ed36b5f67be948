"""The host memory's KV, as admission, growth and preemption use it: of preempted requests and evicted prefixes.

preempted request ── swap_out ──▶ ┌───────────┐ ── load ──▶ its own pages, when it starts again
evicted prefix ───── on_evict ──▶ │ host pages│ ── load ──▶ the pages of any prompt that begins with it
                                  └───────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cache import CachedPrefix, KVCacheManager, Lease
from cache.news.prefix_log import PrefixLog
from cache.node import Namespace
from cache.tiers.page_keys import PageKeys
from cache.tiers.page_tier import TierPage
from engine.host_tier.host_pool import Copies, HostAccount, HostMemory, HostPool, HostTraffic
from engine.host_tier.host_prefixes import HostPrefixes
from engine.host_tier.host_resume_points import host_resume_points
from engine.host_tier.lower_tier import NO_LOWER_TIER, LowerTier, TierTotals
from engine.host_tier.peers import NO_PEERS, KVPeers, PeerTotals
from engine.host_tier.swap import SwapSpace
from engine.values.plan import PagePair, StateCopy, StepPlan
from engine.values.request import Request


class HostKV:
    """Owns every host page of an engine, through its swap space and its prefixes. Without any page, the methods
    that each request or step calls return immediately.
    """

    def __init__(
        self,
        memory: HostMemory | None = None,
        page_size: int = 16,
        preemption: str = "auto",
        min_uses: int = 2,
        log: PrefixLog | None = None,
        block_tokens: int = 0,
        lower: LowerTier = NO_LOWER_TIER,
        hashes: Callable[[Namespace, Sequence[int]], Sequence[int]] | None = None,
        cache: KVCacheManager | None = None,
    ) -> None:
        """`page_size` in tokens; `preemption` is one of `swap.MODES`. Raises ValueError when it is not.

        `log` records the blocks, each of `block_tokens` tokens, that are here. `lower` holds more prefixes.
        `hashes` returns the hashes of a prompt's blocks. `cache` is the device's, which knows the resume points
        that prefixes need; None: they need none.
        """
        self._lower = lower
        self._peers: KVPeers = NO_PEERS
        self.pool = HostPool(memory or HostMemory(), log)
        """The host pages, and the prefixes in them."""
        self._has_pages = self.pool.num_pages > 0
        self._page_size, self._num_out, self._num_in, self._saved_seconds = page_size, 0, 0, 0.0
        self._swap = SwapSpace(self.pool, page_size, preemption)
        self._ends = None if cache is None else host_resume_points(cache, self.pool)
        self._prefixes = HostPrefixes(
            self.pool, page_size, min_uses, block_tokens, self._lower, hashes, self._ends
        )
        self._loading: set[str] = set()  # requests whose pages a step in flight copies to the device
        self.on_evict = self._prefixes.on_evict
        """Called with each node that the device's tree evicts (`KVCacheManager.on_evict`)."""
        self.on_give_up = self._prefixes.on_give_up
        """Called with each node that loses only its resume point (`ResumePoints.on_give_up`)."""

    @property
    def num_pages(self) -> int:
        """All host pages."""
        return self.pool.num_pages

    @property
    def num_evicted(self) -> int:
        """Pages of prefixes evicted since the start."""
        return self.pool.num_evicted

    @property
    def requests(self) -> set[str]:
        """The requests for which KV is here, is on its way, or was looked up: none once they have ended."""
        return self._swap.requests | self._prefixes.requests

    def connect(self, peers: KVPeers) -> None:
        """Fetch prefixes from other engines through `peers` from now on."""
        self._peers = peers
        self._prefixes.connect(peers)

    def peer_totals(self) -> PeerTotals:
        """Count the pages fetched from other engines."""
        return self._peers.totals()

    def lower_totals(self) -> TierTotals:
        """Count the pages moved to and from the lower tier."""
        return self._lower.totals()

    @property
    def traffic(self) -> HostTraffic:
        """The pages copied in both directions."""
        return HostTraffic(self._num_out, self._num_in, self.pool.page_bytes, self._saved_seconds)

    def reset(self) -> int:
        """Forget all prefixes that no request is about to read; return the number of pages that this freed."""
        return self._prefixes.reset()

    def account(self) -> HostAccount:
        """Count the host pages by state; the invariant is that they add up to `num_pages`."""
        return self._swap.account() if self._has_pages else HostAccount()

    def take_in_transfers(self) -> None:
        """Record the pages that have arrived in host memory or were saved below it. `begin_step` does so too."""
        self._prefixes.take_in_transfers()

    def begin_step(self) -> None:
        """Begin to plan a step, which will run after the copies of all steps before it."""
        if self._has_pages:
            self.pool.begin_step()
            self._prefixes.begin_step()

    # --- to the host ---------------------------------------------------------------------------------------

    def swap_out(self, request: Request, start: int, end: int, tokens_per_second: float) -> Copies:
        """Record that a request loses the pages of its lease, in which `end` tokens have KV; only it held those
        from `start` on. Returns the copies to make (`SwapSpace.swap_out`).
        """
        name, lease = request.request_id, request.lease
        assert lease is not None
        if not self._has_pages:
            return Copies([], [])
        self._prefixes.forget(name)
        num_at_end = 0
        if self._ends is not None and not self._swap.holds(name):
            end = self._ends.reaches(lease, end)
            num_at_end = self._ends.num_pages(lease, end) if end else 0
        start = min(start, end)
        pages = self._swap.swap_out(name, lease.pages, start, end, tokens_per_second, num_at_end)
        copies, at_end = Copies(pages, []), self._swap.at_end(name)
        if num_at_end and at_end:
            assert self._ends is not None
            copies.add(self._ends.save(lease, end, at_end))
        return copies

    def take_copies(self) -> Copies:
        """Return the copies of evicted prefixes that the step being planned has to make first."""
        return self._prefixes.take_copies()

    def drop_copies(self) -> None:
        """Give up the copies that `take_copies` would return, because a step has overwritten their sources."""
        copies = self.take_copies()
        self._prefixes.drop(_hosts(copies.pages, copies.states))

    def copied(self, plan: StepPlan) -> None:
        """Note that a step has made its copies to the host and from it."""
        if plan.swap_in or plan.states_in:
            self._loading -= {chunk.request.request_id for chunk in plan.chunks}
        if hosts := _hosts(plan.swap_out, plan.states_out):
            self._num_out += len(plan.swap_out) + sum(len(copy.hosts) for copy in plan.states_out)
            self._prefixes.settle(hosts)

    def failed(self, plan: StepPlan) -> None:
        """Note that a step failed, so that its copies to the host may be missing."""
        self._prefixes.drop(_hosts(plan.swap_out, plan.states_out))
        for request in plan.preempted:
            self._swap.forget(request.request_id)

    # --- to the device -------------------------------------------------------------------------------------

    def fetch(self, request: Request, num_found: int, tokens_per_second: float, now: float) -> None:
        """Begin to load pages of a new request from a lower tier and its source (`HostPrefixes.fetch`)."""
        if self._has_pages:
            self._prefixes.fetch(request, num_found, tokens_per_second, now)

    def is_awaited(self, request_id: str, now: float) -> bool:
        """Whether a waiting request should wait a little longer, because its first pages are being loaded."""
        return self._has_pages and self._prefixes.is_awaited(request_id, now)

    def num_coming(self, request_id: str) -> int:
        """Return how many leading tokens of a waiting request have KV once these have arrived; 0 if none will."""
        return self._prefixes.num_coming(request_id) if self._has_pages else 0

    def reach(self, request: Request, prefix: CachedPrefix, tokens_per_second: float) -> int:
        """Return after how many leading tokens a waiting request can resume, given the prefix in the device's
        tree. `tokens_per_second` (0: not known) is the rate at which they would be computed.
        """
        if not self._has_pages:
            return prefix.num_reusable
        reached = self._swap.end(request.request_id, prefix.num_held)
        if reached > prefix.num_reusable:
            return reached
        return self._prefixes.reach(request, prefix, tokens_per_second)

    def hold(self, request: Request, prefix: CachedPrefix, reached: int) -> None:
        """Keep the pages that `reach` promised to a request until it starts, `release` or `forget`."""
        if reached > max(prefix.num_reusable, self._swap.end(request.request_id, prefix.num_held)):
            self._prefixes.hold(request, prefix, reached)

    def release(self, request_id: str) -> None:
        """Undo `hold`. Idempotent."""
        self._prefixes.release(request_id)

    def start(self, request: Request, prefix: CachedPrefix, tokens_per_second: float) -> int:
        """Return the result of `reach`, and keep its pages for the request until `load` or `forget`."""
        if not self._has_pages:
            return prefix.num_reusable
        self.release(request.request_id)
        reached = self.reach(request, prefix, tokens_per_second)
        self.hold(request, prefix, reached)
        if reached > prefix.num_reusable and tokens_per_second:
            pages = -(-(reached - prefix.num_held) // self._page_size) + self.pool.state_pages
            self._saved_seconds += (
                reached - prefix.num_reusable
            ) / tokens_per_second - pages * self.pool.page_seconds
        return reached

    def is_of_prefix(self, request_id: str) -> bool:
        """Whether a started request begins with a prefix's pages in host memory."""
        return self._prefixes.holds(request_id)

    def load(self, request_id: str, lease: Lease) -> Copies:
        """Return the copies to the device for a started request, which continues in the pages of a lease."""
        if not self._has_pages:
            return Copies([], [])
        at_end, end = self._swap.at_end(request_id), self._swap.end(request_id, lease.num_cached)
        is_awaited = lease.state is not None and lease.state.is_awaited
        pages = self._swap.swap_in(request_id, lease.pages, lease.num_cached, has_end=not is_awaited)
        copies = Copies(pages, [])
        if at_end and is_awaited and not self.is_of_prefix(request_id):
            assert self._ends is not None
            copies.add(self._ends.restore(lease, end, at_end))
        copies.add(self._prefixes.load(request_id, lease))
        if copies.pages or copies.states:
            self._loading.add(request_id)
        self._num_in += len(copies.pages) + sum(len(copy.hosts) for copy in copies.states)
        return copies

    def is_loading(self, request_id: str) -> bool:
        """Whether a step in flight makes the copies of `load`."""
        return request_id in self._loading

    # --- to other engines ----------------------------------------------------------------------------------

    def lend(self, keys: PageKeys, first: int, last: int) -> list[TierPage]:
        """Keep the pages `first` to `last` (exclusive) of a prefix, up to the first gap, where they are until
        `take_back`.
        """
        tier = self.pool.tier
        return tier.lend(keys, first, first + tier.count(keys, first, last))

    def take_back(self, pages: Sequence[TierPage]) -> None:
        """Undo one `lend`."""
        self.pool.tier.take_back(pages)

    def forget(self, request_id: str) -> None:
        """Release all pages of a request that has ended. Idempotent."""
        if self._has_pages:
            self._swap.forget(request_id)
            self._prefixes.forget(request_id)
            self._loading.discard(request_id)


def _hosts(pages: Iterable[PagePair], states: Iterable[StateCopy]) -> list[int]:
    """Return the host pages that copies fill; of a state only its first."""
    return [*[copy.hosts[0] for copy in states], *[host for _, host in pages]]
