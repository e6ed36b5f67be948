"""KV in host memory, as admission, growth and preemption use it: of preempted requests and of evicted prefixes.

preempted request ── swap_out ──▶ ┌───────────┐ ── load ──▶ its own pages, when it starts again
evicted prefix ───── on_evict ──▶ │ host pages│ ── load ──▶ the pages of any prompt that begins with it
                                  └───────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache.node import Namespace
from cache.page_keys import PageKeys
from cache.page_tier import TierPage
from cache.prefix_log import PrefixLog
from engine.request import Request
from engine.scheduling.host_pool import HostAccount, HostMemory, HostPool, HostTraffic, PagePair
from engine.scheduling.host_prefixes import HostPrefixes
from engine.scheduling.lower_tier import NO_LOWER_TIER, LowerTier, TierTotals
from engine.scheduling.peers import NO_PEERS, KVPeers, PeerTotals
from engine.scheduling.swap import SwapSpace


class HostKV:
    """Owns every host page of an engine, through the two that fill them."""

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
    ) -> None:
        """`page_size` in tokens; `preemption` is one of `swap.MODES`. Raises ValueError when it is not.

        `log` is told of the blocks, each of `block_tokens` tokens, that are here. `lower` holds more prefixes.
        `hashes` returns the hashes of a prompt's blocks.
        """
        self._lower = lower
        self._peers: KVPeers = NO_PEERS
        self._pool = HostPool(memory or HostMemory(), log)
        self._page_size, self._num_out, self._num_in, self._saved_seconds = page_size, 0, 0, 0.0
        self._swap = SwapSpace(self._pool, page_size, preemption)
        self._prefixes = HostPrefixes(self._pool, page_size, min_uses, block_tokens, self._lower, hashes)
        self.on_evict = self._prefixes.on_evict
        """To be called with each node that the device's tree evicts (`KVCacheManager.on_evict`)."""

    @property
    def num_pages(self) -> int:
        """All host pages."""
        return self._pool.num_pages

    @property
    def num_evicted(self) -> int:
        """Pages of prefixes that were given up for others, since the start."""
        return self._pool.num_evicted

    def connect(self, peers: KVPeers) -> None:
        """Fetch prefixes from other engines through `peers` from now on."""
        self._peers = peers
        self._prefixes.connect(peers)

    def peer_totals(self) -> PeerTotals:
        """Return what was fetched from other engines."""
        return self._peers.totals()

    def lower_totals(self) -> TierTotals:
        """Return what was moved to and from the lower tier."""
        return self._lower.totals()

    @property
    def traffic(self) -> HostTraffic:
        """What was copied in both directions."""
        return HostTraffic(self._num_out, self._num_in, self._pool.page_bytes, self._saved_seconds)

    def reset(self) -> int:
        """Forget all prefixes that no request is about to read; return the number of pages that are free now."""
        return self._prefixes.reset()

    def account(self) -> HostAccount:
        """Count the host pages by state; the invariant is that they add up to `num_pages`."""
        return self._swap.account()

    def take_in_transfers(self) -> None:
        """Note what has come to host memory and what was saved below it. `begin_step` does so too."""
        self._prefixes.take_in_transfers()

    def begin_step(self) -> None:
        """Begin to plan a step, which will run after the copies of all steps before it."""
        self._pool.begin_step()
        self._prefixes.begin_step()

    # --- to the host ---------------------------------------------------------------------------------------

    def swap_out(
        self, request: Request, table: Sequence[int], start: int, end: int, tokens_per_second: float
    ) -> list[PagePair]:
        """Note that a request is preempted (`SwapSpace.swap_out`); returns the copies to be made."""
        self._prefixes.forget(request.request_id)
        return self._swap.swap_out(request.request_id, table, start, end, tokens_per_second)

    def take_copies(self) -> list[PagePair]:
        """Return the copies of evicted prefixes that the step which is being planned has to make first."""
        return self._prefixes.take_copies()

    def copied(self, copies: Sequence[PagePair]) -> None:
        """Note that a step has made its copies to the host."""
        if copies:
            self._num_out += len(copies)
            self._prefixes.settle(copies)

    def failed(self, copies: Sequence[PagePair], preempted: Sequence[Request]) -> None:
        """Note that a step failed, and what it should have copied for those that were preempted in it and for
        others.
        """
        self._prefixes.drop(copies)
        for request in preempted:
            self._swap.forget(request.request_id)

    # --- to the device -------------------------------------------------------------------------------------

    def fetch(self, request: Request, num_found: int, tokens_per_second: float, now: float) -> None:
        """Begin to load what a lower tier and its source have of a new request (`HostPrefixes.fetch`)."""
        self._prefixes.fetch(request, num_found, tokens_per_second, now)

    def is_awaited(self, request_id: str, now: float) -> bool:
        """Whether a waiting request had better wait a little longer, as what it begins with is on its way."""
        return self._prefixes.is_awaited(request_id, now)

    def num_coming(self, request_id: str) -> int:
        """Return how many leading tokens of a waiting request have KV when that has come; 0 if nothing comes."""
        return self._prefixes.num_coming(request_id)

    def reach(self, request: Request, num_found: int, tokens_per_second: float) -> int:
        """Return how many leading tokens of a waiting request have KV, given that the device's tree has
        `num_found`. `tokens_per_second` (0: not known) is the rate at which they would be computed.
        """
        reached = self._swap.reach(request.request_id, num_found)
        if reached > num_found:
            return reached
        return self._prefixes.reach(request, num_found, tokens_per_second)

    def start(self, request: Request, num_found: int, tokens_per_second: float) -> int:
        """Return what `reach` does, and keep it for the request until `load` or `forget`."""
        reached = self.reach(request, num_found, tokens_per_second)
        if reached > self._swap.reach(request.request_id, num_found):
            self._prefixes.hold(request, num_found, reached)
        if reached > num_found and tokens_per_second:
            pages = -(-(reached - num_found) // self._page_size)
            self._saved_seconds += (reached - num_found) / tokens_per_second - pages * self._pool.page_seconds
        return reached

    def load(self, request_id: str, table: list[int], num_found: int) -> list[PagePair]:
        """Return the copies to the device for a request that was started and continues in the pages of `table`."""
        copies = [*self._swap.swap_in(request_id, table, num_found), *self._prefixes.load(request_id, table)]
        self._num_in += len(copies)
        return copies

    # --- to other engines ----------------------------------------------------------------------------------

    def lend(self, keys: PageKeys, first: int, last: int) -> list[TierPage]:
        """Keep the pages of a prefix from `first` on, before `last`, that are found without a gap, where they are
        until `take_back`.
        """
        tier = self._pool.tier
        return tier.lend(keys, first, first + tier.count(keys, first, last))

    def take_back(self, pages: Sequence[TierPage]) -> None:
        """Undo one `lend`."""
        self._pool.tier.take_back(pages)

    def forget(self, request_id: str) -> None:
        """Let go of everything of a request that has ended. Idempotent."""
        self._swap.forget(request_id)
        self._prefixes.forget(request_id)
