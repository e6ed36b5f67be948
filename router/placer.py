"""Where a prompt goes: what is cached where, how busy who is, and the policy that weighs the two.

    wire: deltas, snapshots ─▶ PrefixIndex ─┐
                                            ├─▶ Policy ─▶ Decision ─▶ booked at once, and recorded
    wire: heartbeats ────────▶ Fleet ───────┘

All in this process's memory: nothing here waits for another one. Serve's router asks in one thread, the wire's
news come in another; a lock keeps them apart.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from cache.node import Namespace
from cache.prefix_hash import block_hashes, prefix_key, prefix_root
from router.cost import RouteQuery, uncached_tokens
from router.decisions import DecisionLog, DecisionRecord
from router.fleet import Fleet
from router.hot_prefixes import HotPrefix, HotPrefixes
from router.policies import Decision, Policy
from router.policy_names import policy_named
from router.prefix_index import PrefixIndex


class Placeable(Protocol):
    """A request, as far as placing it goes."""

    @property
    def request_id(self) -> str:
        """Unique in this process."""
        ...

    @property
    def model(self) -> str:
        """Its name; with `salt`, what prefixes are shared within."""
        ...

    @property
    def salt(self) -> str:
        """See `model`."""
        ...

    @property
    def session_id(self) -> str | None:
        """A hint that requests belong together."""
        ...

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt."""
        ...

    @property
    def output_ids(self) -> Sequence[int]:
        """What was already generated for it elsewhere."""
        ...

    @property
    def num_reusable(self) -> int:
        """Leading tokens that may come from a cache: fewer than all when their logits are wanted too."""
        ...

    @property
    def block_hashes(self) -> Sequence[int] | None:
        """What `Placer.block_hashes` returned for this request; None: it was not asked yet."""
        ...


@dataclass(frozen=True, slots=True)
class PlacerSettings:
    """How a process places requests."""

    policy: str = "cost"
    """A name of `router.policies.POLICIES`, or a class of one's own as "package.module:Class"."""
    block_tokens: int = 16
    """Tokens to a block of the prefix index; the engines' `block_tokens`."""
    key_blocks: int = 4
    """Prompts that nobody holds are kept together by their first so many blocks."""
    max_blocks: int = 4_000_000
    """Distinct blocks that the index keeps, of about 130 bytes each."""
    expect_s: float = 10.0
    """Seconds for which a dispatched prompt counts as cached before its replica confirms it."""
    decisions_kept: int = 1000
    """Decisions that can be looked up."""
    hot_tokens: int = 0
    """Tokens of prompts' beginnings that are kept track of, to know which are worth most; 0: none are."""
    hot_half_life_s: float = 600.0
    """Seconds after which the use of a beginning counts half."""


@dataclass(frozen=True, slots=True)
class _Open:
    """A request that has not ended."""

    tokens: Sequence[int]
    root: int
    chain: Sequence[int]
    usable: Sequence[int]
    """The beginning of the chain that may come from a cache."""

    def continued(self, generated: Sequence[int], block_tokens: int) -> list[int]:
        """The chain of all tokens; the last of those generated was never computed with."""
        unfinished = self.tokens[len(self.chain) * block_tokens :]
        last = self.chain[-1] if self.chain else self.root
        return [*self.chain, *block_hashes([*unfinished, *generated[:-1]], last, block_tokens)]


class Placer:
    """Thread-safe."""

    def __init__(
        self,
        fleet: Fleet,
        settings: PlacerSettings | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or PlacerSettings()
        self.num_errors = 0
        """Requests that could not be placed by the policy and went to the least loaded."""
        self.on_decided: Callable[[float], None] = lambda _: None
        """Hears how long each placement took, in seconds."""
        self._fleet, self._clock = fleet, clock
        self._policy: Policy = policy_named(self.settings.policy)
        self._rng = rng or random.Random()
        self._index = PrefixIndex(self.settings.block_tokens, self.settings.max_blocks, self.settings.expect_s)
        self._log = DecisionLog(self.settings.decisions_kept)
        self._hot: HotPrefixes | None = None
        if self.settings.hot_tokens:
            tokens, half_life_s = self.settings.hot_tokens, self.settings.hot_half_life_s
            self._hot = HotPrefixes(self.settings.block_tokens, tokens, half_life_s=half_life_s)
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()
        fleet.subscribe(self._forget_departed)

    # --- placing -------------------------------------------------------------------------------------------

    def place(self, request: Placeable, candidates: Collection[str], avoid: Collection[str] = ()) -> Decision:
        """Order the candidates for a request, and count it where it goes first. O(tokens of the prompt)."""
        began = time.perf_counter()
        decision = self._decide(request, candidates, avoid)
        self.on_decided(time.perf_counter() - began)
        return decision

    def _decide(self, request: Placeable, candidates: Collection[str], avoid: Collection[str]) -> Decision:
        tokens = [*request.prompt_ids, *request.output_ids] if request.output_ids else request.prompt_ids
        namespace, block_tokens = Namespace(request.model, salt=request.salt), self.settings.block_tokens
        root = prefix_root(namespace)
        chain = self.block_hashes(request)
        first = self.settings.key_blocks
        key = chain[first - 1] if len(chain) >= first else prefix_key(tokens, root)
        replicas, utilisation = self._fleet.candidates(candidates, avoid), self._fleet.utilisation()
        with self._lock:
            now = self._clock()
            usable = chain[: request.num_reusable // block_tokens]
            held = self._index.match(usable, now)
            overlap = {replica: blocks * block_tokens for replica, blocks in held.items()}
            query = RouteQuery(len(tokens), overlap, key, request.session_id, utilisation, chain)
            decision = self._policy.decide(query, replicas, self._rng)
            if not decision.order:
                return decision
            chosen = decision.order[0]
            self._index.expect(chosen, chain, now)
            if self._hot is not None and not request.output_ids:
                self._hot.record(namespace, tokens, chain, now)
            self._open[request.request_id] = _Open(tokens, root, chain, usable)
            self._log.add(request.request_id, time.time(), request.model, query, decision)
        self._fleet.book(request.request_id, chosen, uncached_tokens(len(tokens), overlap.get(chosen, 0)))
        if self._fleet.placement(request.request_id) is None:  # The client has left meanwhile.
            self.release(request.request_id)
        return decision

    def block_hashes(self, request: Placeable) -> Sequence[int]:
        """Hash the blocks of a request's prompt and of what was generated for it: names of prefixes in the index.

        O(tokens), so a request that carries them is not hashed again. Needs no lock.
        """
        if request.block_hashes is not None:
            return request.block_hashes
        root = prefix_root(Namespace(request.model, salt=request.salt))
        return block_hashes([*request.prompt_ids, *request.output_ids], root, self.settings.block_tokens)

    def place_blindly(self, request_id: str | None, candidates: Collection[str]) -> list[str]:
        """The candidates by their number of requests: for calls that are no prompts, and when `place` failed."""
        loads, lost = self._fleet.loads(), self._fleet.lost()
        order = sorted(candidates, key=lambda replica: (replica in lost, loads.get(replica, 0.0), replica))
        if request_id is not None and order:
            self._fleet.book(request_id, order[0])
        return order

    def overrule(self, request_id: str, replica: str) -> None:
        """The request went to `replica`, which may be another than was chosen."""
        before = self._fleet.placement(request_id)
        with self._lock:
            request = self._open.get(request_id)
            if request is None or before in (None, replica):
                return
            now, chain = self._clock(), request.chain
            held = self._index.match(request.usable, now).get(replica, 0) * self.settings.block_tokens
            self._index.expect(replica, chain, now)
            self._log.overrule(request_id, replica, held)
        self._fleet.book(request_id, replica, uncached_tokens(len(request.tokens), held))

    def release(self, request_id: str, generated: Sequence[int] = ()) -> None:
        """The request has ended, however it did. What was `generated` lies in its replica's cache now: the next
        turn of a conversation may come sooner than the replica's word of it.
        """
        replica = self._fleet.placement(request_id)
        self._fleet.release(request_id)
        with self._lock:
            request = self._open.pop(request_id, None)
            # A replica that is gone must not come back into the index.
            if request is not None and replica is not None and generated and replica in self._fleet.names():
                chain = request.continued(generated, self.settings.block_tokens)
                self._index.expect(replica, chain, self._clock())

    # --- news ----------------------------------------------------------------------------------------------

    def apply_delta(self, replica: str, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """A replica's cache changed."""
        with self._lock:
            if replica in self._fleet.names():  # Late news would bring one back that is gone.
                self._index.apply(replica, stored, evicted)

    def replace(self, replica: str, hashes: Sequence[int]) -> None:
        """All that a replica's cache holds."""
        with self._lock:
            if replica in self._fleet.names():
                self._index.replace(replica, hashes)

    def settle(self, request_id: str, num_cached: int) -> None:
        """A request's first token came, and how much of its prompt the engine had found."""
        with self._lock:
            self._log.settle(request_id, num_cached)

    def _forget_departed(self) -> None:
        with self._lock:
            for replica in set(self._index.replicas) - self._fleet.names():
                self._index.forget(replica)

    # --- explaining ----------------------------------------------------------------------------------------

    def decision(self, request_id: str) -> DecisionRecord | None:
        """Why a request went where it went; None when that was forgotten."""
        with self._lock:
            return self._log.get(request_id)

    def decisions(self, limit: int) -> list[DecisionRecord]:
        """The last decisions, newest first."""
        with self._lock:
            return self._log.latest(limit)

    def counts(self) -> Counter[tuple[str, str]]:
        """Placements by (policy, reason)."""
        with self._lock:
            return Counter(self._log.by_reason)

    def totals(self) -> dict[str, int]:
        """Tokens of regret, and of predicted and actual hits, since the process started; blocks in the index."""
        with self._lock:
            return {
                "regret": self._log.regret_tokens,
                "predicted": self._log.predicted_tokens,
                "actual": self._log.actual_tokens,
                "blocks": self._index.num_blocks,
                "dropped": self._index.num_dropped,
            }

    def hot_prefixes(self, max_tokens: int) -> list[HotPrefix]:
        """The beginnings of prompts worth most to hold, of at most `max_tokens` together."""
        with self._lock:
            return [] if self._hot is None else self._hot.top(max_tokens, self._clock())

    def uncached_tokens(self, request: Placeable) -> int:
        """Tokens of a prompt that the best holder would have to compute. O(tokens of the prompt)."""
        chain = self.block_hashes(request)[: request.num_reusable // self.settings.block_tokens]
        with self._lock:
            held = max(self._index.match(chain, self._clock()).values(), default=0)
        return uncached_tokens(len(request.prompt_ids), held * self.settings.block_tokens)
