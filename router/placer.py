"""Placement of a prompt: where it is cached, how busy each replica is, and the policy that weighs the two.

    wire: deltas, snapshots ─▶ PrefixIndex ─┐
                                            ├─▶ Policy ─▶ Decision ─▶ booked immediately, and recorded
    wire: heartbeats ────────▶ Fleet ───────┘

Everything is in this process's memory, so nothing here waits for another process. Serve's router reports replicas
in one thread, while requests and messages of the wire come in another; a lock separates them.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

from cache.node import Namespace
from cache.prefix_hash import block_hashes, prefix_key, prefix_root
from cache.shared.shared_prefixes import SharedPrefixes
from router.addresses import is_store
from router.cost import RouteQuery, uncached_tokens
from router.decisions import DecisionLog, DecisionRecord
from router.fetch.fetch_sources import FetchSources, PlannedFetch
from router.fetch.hot_prefixes import HotPrefix, HotPrefixes
from router.fetch.roles import Pools
from router.fetch.worth_holding import WorthHolding
from router.fleet import Fleet
from router.policies import Decision, Policy
from router.policy_names import policy_named
from router.prefix_index import PrefixIndex

logger = logging.getLogger("ray.serve")

FEWEST_BLOCKS, MOST_BLOCKS = 4_000_000, 16_000_000
"""Bounds of an index that adjusts its own size, at about 130 bytes a block."""


class Placeable(Protocol):
    """A request as placement needs it."""

    @property
    def request_id(self) -> str:
        """An id that is unique in this process."""

    @property
    def model(self) -> str:
        """The model's name. Requests share prefixes only within one model and one salt."""

    @property
    def salt(self) -> str:
        """Separates prefixes within a model; see `model`."""

    @property
    def session_id(self) -> str | None:
        """A hint by the client that requests belong together."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Token ids of the prompt."""

    @property
    def output_ids(self) -> Sequence[int]:
        """Token ids that another replica has already generated for it."""

    @property
    def num_reusable(self) -> int:
        """Leading tokens that may come from a cache; fewer than all when the prompt's logits are wanted."""

    @property
    def block_hashes(self) -> Sequence[int] | None:
        """Result of `Placer.block_hashes` for this request; None before it was called."""


@dataclass(frozen=True, slots=True)
class PlacerSettings:
    """Settings by which a process places requests."""

    policy: str = "cost"
    """A name of `router.policies.POLICIES`, or a custom class as "package.module:Class"."""
    block_tokens: int = 16
    """Tokens of a block of the prefix index; equal to the engines' `block_tokens`."""
    key_blocks: int = 4
    """Leading blocks that determine a prompt's rendezvous place while no replica holds any of it."""
    max_blocks: int | None = None
    """Distinct blocks that the index keeps, about 130 bytes each; None: as many as the replicas' KV memory holds,
    as they report it, but at least `FEWEST_BLOCKS` and at most `MOST_BLOCKS`."""
    expect_s: float = 10.0
    """Seconds for which a dispatched prompt counts as cached before its replica confirms it."""
    decisions_kept: int = 1000
    """Decisions that remain available for look-up."""
    hot_tokens: int = 0
    """Tokens of shared prefixes whose use is tracked, for the warm-up of new replicas; 0: none."""
    hot_half_life_s: float = 600.0
    """Seconds after which the use of a prefix counts half."""
    keep_tokens: int = 0
    """Most tokens of these prefixes that are named when the only replica that holds them leaves; 0: none."""
    keep_at_once: int = 8
    """Prefixes that others then fetch from it at the same time."""
    apart_above_tokens: int | Literal["auto"] | None = None
    """Tokens to compute above which a prompt is computed apart, by replicas that have that role
    (`router.fetch.roles`); None: replicas have no roles."""

    @property
    def at_start(self) -> PlacerSettings:
        """Return these settings without those that a placer can change while it runs."""
        usual = PlacerSettings()
        return replace(self, policy=usual.policy, key_blocks=usual.key_blocks)


@dataclass(frozen=True, slots=True)
class _Open:
    """A request that has not ended."""

    tokens: Sequence[int]
    seed: int
    """The hash from which the chain continues."""
    chain: Sequence[int]
    usable: Sequence[int]
    """Leading part of the chain that may come from a cache."""

    def continued(self, generated: Sequence[int], block_tokens: int) -> list[int]:
        """Return the chain of prompt and output; the last generated token has no KV yet."""
        unfinished = self.tokens[len(self.chain) * block_tokens :]
        return [*self.chain, *block_hashes([*unfinished, *generated[:-1]], self.seed, block_tokens)]


class Placer:
    """Places the requests of one deployment and remembers why. Thread-safe."""

    def __init__(
        self,
        fleet: Fleet,
        settings: PlacerSettings | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or PlacerSettings()
        self.num_errors = 0
        """Requests for which the policy failed; they went to the least loaded replica."""
        self.on_decided: Callable[[float], None] = lambda _: None
        """Called with the duration of each placement, in seconds."""
        self.on_departed: Callable[[str, list[HotPrefix]], None] = lambda replica, prefixes: None
        """Called, in any thread, with a replica that is no longer in the fleet and what only it held."""
        self._fleet, self._clock = fleet, clock
        self._policy: Policy = policy_named(self.settings.policy)
        self._rng = rng or random.Random()
        num_blocks = self.settings.max_blocks or FEWEST_BLOCKS
        self._index = PrefixIndex(self.settings.block_tokens, num_blocks, self.settings.expect_s)
        self._log = DecisionLog(self.settings.decisions_kept)
        hot: HotPrefixes | None = None
        if self.settings.hot_tokens:
            tokens, half_life_s = self.settings.hot_tokens, self.settings.hot_half_life_s
            hot = HotPrefixes(self.settings.block_tokens, tokens, half_life_s=half_life_s)
        self._open: dict[str, _Open] = {}
        self._sources = FetchSources(fleet)
        self._lock = threading.Lock()
        self._worth = WorthHolding(fleet, self._index, self._sources, hot, self._lock, clock)
        above = self.settings.apart_above_tokens
        self._pools = None if above is None else Pools(fleet, None if above == "auto" else above)
        self._handed_over: set[str] = set()  # open requests that move after their first token
        self._shared = self._worth.shared
        fleet.subscribe(self._forget_departed)

    def take_over(self, settings: PlacerSettings) -> None:
        """Change the policy and the number of key blocks from now on; all else stays as at the start."""
        policy = policy_named(settings.policy)
        self.settings = replace(self.settings, policy=settings.policy, key_blocks=settings.key_blocks)
        self._policy = policy

    def share(self, prefixes: SharedPrefixes) -> None:
        """Expect the engines to share these prefixes among all salts. Call it before the first request."""
        self._shared = self._worth.shared = prefixes

    # --- placing -------------------------------------------------------------------------------------------

    def order(self, request: Placeable, candidates: Collection[str], avoid: Collection[str] = ()) -> Sequence[str]:
        """Order the candidates for a request, best first, and book it at the first. Never raises.

        If the policy fails, the least loaded replica comes first, and the failure is counted in `num_errors`.
        """
        try:
            return self.place(request, candidates, avoid).order
        except Exception:
            self.num_errors += 1
            logger.exception("the routing policy failed; the request goes to the least loaded replica")
            return self.place_blindly(getattr(request, "request_id", None), candidates)

    def place(self, request: Placeable, candidates: Collection[str], avoid: Collection[str] = ()) -> Decision:
        """Order the candidates for a request and book it at the first of them. O(tokens of the prompt)."""
        began = time.perf_counter()
        decision = self._decide(request, candidates, avoid)
        self.on_decided(time.perf_counter() - began)
        return decision

    def _decide(self, request: Placeable, candidates: Collection[str], avoid: Collection[str]) -> Decision:
        tokens = [*request.prompt_ids, *request.output_ids] if request.output_ids else request.prompt_ids
        namespace, block_tokens = Namespace(request.model, salt=request.salt), self.settings.block_tokens
        chain = self.block_hashes(request)
        seed = self._shared.seed(namespace, tokens, chain, block_tokens)
        first = self.settings.key_blocks
        key = chain[first - 1] if len(chain) >= first else prefix_key(tokens, prefix_root(namespace))
        utilisation = self._fleet.utilisation()
        with self._lock:
            now = self._clock()
            usable = chain[: request.num_reusable // block_tokens]
            overlap = self._index.match(usable, now).times(block_tokens)
            is_handed_over = False
            if self._pools is not None:
                is_resumed = bool(request.output_ids)
                candidates, is_handed_over = self._pools.choose(
                    candidates, avoid, len(tokens), overlap, is_resumed
                )
            replicas = self._fleet.candidates(candidates, avoid)
            query = RouteQuery(len(tokens), overlap, key, request.session_id, utilisation, chain)
            query = self._sources.query(query, overlap, replicas, partial(self._reach, usable))
            decision = self._policy.decide(query, replicas, self._rng)
            if not decision.order:
                return decision
            chosen = decision.order[0]
            fetch = self._sources.plan(request.request_id, query, chosen, replicas)
            self._log.add(request.request_id, time.time(), request.model, query, decision, fetch)
            held, most_held = overlap.get(chosen, 0), overlap.most
            self._index.use(chain[: most_held // block_tokens])
            self._index.expect(chosen, chain, now)  # the overlap is outdated after this
            if not request.output_ids:
                self._worth.record(namespace, tokens, chain, now)
            self._open[request.request_id] = _Open(tokens, seed, chain, usable)
            if is_handed_over:
                self._handed_over.add(request.request_id)
            if fetch is not None:
                held = fetch.num_tokens
        self._fleet.book(request.request_id, chosen, uncached_tokens(len(tokens), held))
        if self._fleet.placement(request.request_id) is None:  # The client disconnected meanwhile.
            self.release(request.request_id)
        return decision

    def _reach(self, chain: Sequence[int], store: str, num_tokens: int) -> int:
        block_tokens = self.settings.block_tokens
        return self._index.reach(store, chain, num_tokens // block_tokens) * block_tokens

    def block_hashes(self, request: Placeable) -> Sequence[int]:
        """Hash the blocks of a request's prompt and of its output so far, by which the index knows prefixes.

        O(tokens), unless the request carries its hashes already. Needs no lock.
        """
        if request.block_hashes is not None:
            return request.block_hashes
        tokens = [*request.prompt_ids, *request.output_ids]
        namespace = Namespace(request.model, salt=request.salt)
        return self._shared.chain(namespace, tokens, self.settings.block_tokens)

    def place_blindly(self, request_id: str | None, candidates: Collection[str]) -> list[str]:
        """Order the candidates by their requests: for calls without a prompt, and after `place` has failed."""
        loads, lost = self._fleet.loads(), self._fleet.lost()
        order = sorted(candidates, key=lambda replica: (replica in lost, loads.get(replica, 0.0), replica))
        if request_id is not None and order:
            self._fleet.book(request_id, order[0])
        return order

    def overrule(self, request_id: str, replica: str) -> None:
        """Move the booking of a request to `replica`, which received it instead of the chosen one."""
        before = self._fleet.placement(request_id)
        with self._lock:
            request = self._open.get(request_id)
            if request is None or before in (None, replica):
                return
            now, chain = self._clock(), request.chain
            overlap = self._index.match(request.usable, now).times(self.settings.block_tokens)
            held = overlap.get(replica, 0)
            self._log.overrule(request_id, replica, overlap)
            self._index.expect(replica, chain, now)  # the overlap is outdated after this
        self._fleet.book(request_id, replica, uncached_tokens(len(request.tokens), held))

    def release(self, request_id: str, generated: Sequence[int] = ()) -> None:
        """Forget a request that has ended, for any reason.

        The tokens that were `generated` are in its replica's cache now. The index expects them there immediately:
        the next turn of a conversation may arrive before the replica's message about them.
        """
        replica = self._fleet.placement(request_id)
        self._fleet.release(request_id)
        with self._lock:
            self._sources.end(request_id)
            self._handed_over.discard(request_id)
            request = self._open.pop(request_id, None)
            # A replica that no longer exists must not return to the index.
            if request is not None and replica is not None and generated and self._fleet.has(replica):
                chain = request.continued(generated, self.settings.block_tokens)
                if len(chain) > len(request.chain):  # otherwise the placement announced all blocks
                    self._index.expect(replica, chain, self._clock())

    # --- news ----------------------------------------------------------------------------------------------

    def apply_delta(self, replica: str, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """Apply a delta to the index: a change of the blocks in a replica's cache or a store of files."""
        with self._lock:
            if self._is_known(replica):
                self._fit_index()
                self._index.apply(replica, stored, evicted)

    def apply_tiers(self, replica: str, hashes: Sequence[int], tiers: Sequence[int]) -> None:
        """Apply the tiers of blocks that a replica holds (`PrefixIndex.place_in_tiers`)."""
        with self._lock:
            if self._is_known(replica):
                self._index.place_in_tiers(replica, hashes, tiers)

    def replace(self, replica: str, hashes: Sequence[int]) -> None:
        """Replace all that the index knows of a replica's cache or a store by a snapshot or its first part."""
        with self._lock:
            if self._is_known(replica):
                self._fit_index()
                self._index.replace(replica, hashes)

    def extend(self, replica: str, hashes: Sequence[int]) -> None:
        """Add a further part of a snapshot to what the index knows of a replica's cache or a store."""
        with self._lock:
            if self._is_known(replica):
                self._fit_index()
                self._index.extend(replica, hashes)

    def _is_known(self, name: str) -> bool:
        """Return whether this is the name of a replica, or of one's store; a late message may name another."""
        return self._fleet.has(name) or name in self._fleet.stores().values()

    def _fit_index(self) -> None:
        """Give an index that adjusts its own size room for all blocks that the replicas can hold."""
        if self.settings.max_blocks is None:
            most_held = self._fleet.kv_tokens() // self.settings.block_tokens
            self._index.max_blocks = min(max(most_held, FEWEST_BLOCKS), MOST_BLOCKS)

    def settle(self, request_id: str, num_cached: int) -> None:
        """Record how many prompt tokens the engine found in its cache, which a request's first token reports."""
        with self._lock:
            self._sources.end(request_id)
            self._log.settle(request_id, num_cached)

    def is_handed_over(self, request_id: str) -> bool:
        """Whether an open request continues at another replica after its first token."""
        with self._lock:
            return request_id in self._handed_over

    def is_apart(self, num_uncached: int) -> bool:
        """Whether a prompt with so many tokens to compute goes to replicas that only compute prompts."""
        return self._pools is not None and self._pools.is_apart(num_uncached)

    def planned_fetch(self, request_id: str) -> PlannedFetch | None:
        """Return the fetch planned for the replica at which an open request was placed; None: no fetch."""
        with self._lock:
            return self._sources.planned(request_id)

    def _forget_departed(self) -> None:
        with self._lock:
            departed = [name for name in self._index.replicas if not self._is_known(name)]
        for replica in departed:
            lost = [] if is_store(replica) else list(self.only_held_by(replica))
            with self._lock:
                self._index.forget(replica)
            if lost:
                self.on_departed(replica, lost)

    # --- explaining ----------------------------------------------------------------------------------------

    def decision(self, request_id: str) -> DecisionRecord | None:
        """Return why a request went to its replica; None when that is no longer remembered."""
        with self._lock:
            return self._log.get(request_id)

    def decisions(self, limit: int) -> list[DecisionRecord]:
        """Return the last decisions, newest first."""
        with self._lock:
            return self._log.latest(limit)

    def counts(self) -> Counter[tuple[str, str]]:
        """Count the placements by (policy, reason)."""
        with self._lock:
            return Counter(self._log.by_reason)

    def totals(self) -> dict[str, int]:
        """Return tokens of regret and of predicted and actual hits since the start, and the size of the index."""
        with self._lock:
            return {
                "regret": self._log.regret_tokens,
                "predicted": self._log.predicted_tokens,
                "actual": self._log.actual_tokens,
                "blocks": self._index.num_blocks,
                "max_blocks": self._index.max_blocks,
                "dropped": self._index.num_dropped,
            }

    def hot_prefixes(self, max_tokens: int) -> list[HotPrefix]:
        """Return the shared prefixes most worth holding, and the replicas that lend them (`WorthHolding.top`)."""
        return self._worth.top(max_tokens)

    def only_held_by(self, replica: str, max_tokens: int | None = None) -> Iterator[HotPrefix]:
        """Yield the shared prefixes that are lost with a replica, of the top `max_tokens` tokens, or `keep_tokens`
        (`WorthHolding.only_held_by`).
        """
        return self._worth.only_held_by(replica, self.settings.keep_tokens if max_tokens is None else max_tokens)

    def uncached_tokens(self, request: Placeable) -> int:
        """Count the prompt tokens that the best holder would have to compute. O(tokens of the prompt)."""
        chain = self.block_hashes(request)[: request.num_reusable // self.settings.block_tokens]
        with self._lock:
            held = self._index.match(chain, self._clock()).most
        return uncached_tokens(len(request.prompt_ids), held * self.settings.block_tokens)
