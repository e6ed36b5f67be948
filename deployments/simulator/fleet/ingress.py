"""A simulated ingress: it decides by its own index and its own view of the load, both slightly outdated."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from deployments.simulator.fleet.fetches import STORE, own_files
from deployments.simulator.fleet.load_report import LoadReport
from deployments.simulator.fleet.replica import Job
from deployments.simulator.fleet.scenario import Scenario
from deployments.simulator.fleet.utilisation import Utilisation
from router.cost import Candidate, RouteQuery, decode_slowdown, evict_price, queue_seconds, uncached_tokens
from router.fetch.fetching import FetchQuery, Source, best_fetch
from router.policies import Decision, Policy
from router.prefix_index import PrefixIndex

NUM_PEERS = 2
"""Most holders of a prompt's beginning from which a replica may fetch it."""
KEY_BLOCKS = 2
"""Blocks of a prompt that determine its rendezvous place: one more than the system prompt that all may share."""


@dataclass(frozen=True, slots=True)
class CacheNews:
    """The blocks that a replica stored and evicted since its last news."""

    time: float
    replica: str
    epoch: int
    stored: Sequence[int]
    evicted: Sequence[int]


@dataclass(frozen=True, slots=True)
class FileNews:
    """The blocks written to a store of files, or given up there, since its last news."""

    time: float
    store: str
    stored: Sequence[int]
    evicted: Sequence[int]


@dataclass(slots=True)
class KnownReplica:
    """A replica as ingresses know it: its latest report that is old enough to have arrived."""

    name: str
    report: LoadReport
    num_pages: int
    is_alive: bool = True
    is_draining: bool = False
    epoch: int = 0

    @property
    def is_serving(self) -> bool:
        """Whether it accepts requests."""
        return self.is_alive and not self.is_draining


class SimulatedIngress:
    """One of several ingresses. It reads the log of cache changes at its own pace; load reports are delayed."""

    def __init__(self, policy: Policy, scenario: Scenario, block_tokens: int, reuse_s: float, seed: str) -> None:
        """`reuse_s`: REUSE_S on the simulation's clock."""
        self._policy = policy
        self._scenario = scenario
        self._block_tokens = block_tokens
        self._index = PrefixIndex(block_tokens)
        self._files: dict[str, set[int]] = {}
        self._utilisation = Utilisation()
        self._rng = random.Random(seed)
        self._sent: dict[str, deque[tuple[float, int]]] = {}  # dispatches that no report includes: (time, tokens)
        self._read = 0
        self._reuse_s = reuse_s

    def hear(self, news: Sequence[CacheNews | FileNews], members: Mapping[str, KnownReplica], now: float) -> None:
        """Apply the cache changes that are older than the delay."""
        until = now - self._scenario.cache_delay
        while self._read < len(news) and news[self._read].time <= until:
            item = news[self._read]
            self._read += 1
            if isinstance(item, FileNews):
                known = self._files.setdefault(item.store, set())
                known.update(item.stored)
                known.difference_update(item.evicted)
            elif members[item.replica].epoch == item.epoch:
                self._index.apply(item.replica, item.stored, item.evicted)

    def lose(self, replica: str) -> None:
        """Forget a replica that died."""
        self._index.forget(replica)
        self._sent.pop(replica, None)

    def place(
        self, job: Job, members: Sequence[KnownReplica], now: float, among: Collection[str] | None = None
    ) -> tuple[Decision, Source | None]:
        """Choose a replica of those in `among`, and what it should fetch; count the dispatch immediately."""
        candidates = [self._candidate(each, now) for each in members if among is None or each.name in among]
        query = self._query(job, members, self._utilisation.observe(candidates, now), now)
        decision = self._policy.decide(query, candidates, self._rng)
        chosen = decision.order[0]
        fetch = best_fetch(query, next(each for each in candidates if each.replica == chosen))
        held = query.overlap.get(chosen, 0) if fetch is None else fetch.source.tokens
        self._sent.setdefault(chosen, deque()).append((now, uncached_tokens(query.num_tokens, held)))
        self._index.use(job.chain)
        self._index.expect(chosen, job.chain, now)
        return decision, None if fetch is None else fetch.source

    def held_blocks(self, chain: Sequence[int], now: float) -> Mapping[str, int]:
        """Return how many blocks of a prompt each replica holds."""
        return dict(self._index.match(chain, now))

    def finish(self, job: Job, replica: str) -> None:
        """Report to a policy with its own count of requests that one has ended at a replica."""
        if (finished := getattr(self._policy, "finished", None)) is not None:
            finished(job.chain, replica)

    def shortest_queue(self, members: Sequence[KnownReplica], now: float) -> float:
        """Return the seconds until the least busy replica would start a new prompt; 0 when none serves."""
        serving = [self._candidate(member, now) for member in members if member.is_serving]
        return min(map(queue_seconds, serving), default=0.0)

    def decoder(self, job: Job, members: Sequence[KnownReplica], now: float) -> str:
        """Choose which of `members` decodes a request that another replica computes: by load and memory."""
        least = min(
            (self._candidate(member, now) for member in members),
            key=lambda one: (decode_slowdown(job.num_tokens, one), one.num_running, -one.pages_free, one.replica),
        )
        self._sent.setdefault(least.replica, deque()).append((now, 0))
        return least.replica

    def uncached_tokens(self, job: Job, now: float, among: Collection[str] | None = None) -> int:
        """Return the prompt tokens that the best holder of those in `among` would have to compute."""
        holders = self._index.match(job.chain, now).items()
        held = max((blocks for name, blocks in holders if among is None or name in among), default=0)
        return uncached_tokens(job.num_tokens, held * self._block_tokens)

    def _query(self, job: Job, members: Sequence[KnownReplica], utilisation: float, now: float) -> RouteQuery:
        held = self._index.match(job.chain, now)
        size, prompt, tiers = self._block_tokens, job.request.num_tokens, self._scenario.tiers
        overlap = {replica: min(blocks * size, prompt) for replica, blocks in held.items()}
        key = job.chain[min(KEY_BLOCKS, len(job.chain)) - 1]
        if not tiers.has_fetches:
            return RouteQuery(job.num_tokens, overlap, key, None, utilisation, job.chain)
        alive = {member.name: member for member in members if member.is_alive}
        return FetchQuery(
            job.num_tokens, overlap, key, None, utilisation, job.chain,
            peers=self._peers(overlap, alive),
            files=self._readable(job, held, alive) if tiers.file_tokens else None,
            transfers={name: member.report.num_transfers for name, member in alive.items()},
            kv_bytes_per_token=tiers.kv_bytes_per_token,
        )  # fmt: skip

    def _peers(self, overlap: Mapping[str, int], alive: Mapping[str, KnownReplica]) -> list[Source]:
        """Return the best holders, those with fewer transfers first among equals."""
        tiers = self._scenario.tiers
        if tiers.peer_bandwidth is None:
            return []
        holders = [name for name in overlap if name in alive]
        holders.sort(key=lambda name: (-overlap[name], alive[name].report.num_transfers))
        bandwidth, latency = tiers.peer_bandwidth, tiers.peer_latency_s
        return [Source(name, overlap[name], bandwidth, latency) for name in holders[:NUM_PEERS]]

    def _readable(self, job: Job, held: Mapping[str, int], alive: Mapping[str, KnownReplica]) -> dict[str, Source]:
        """Return how much of a prompt each replica has with the files that it can read after its own part."""
        tiers, chain = self._scenario.tiers, job.chain
        found = {}
        for name in alive:
            store = STORE if tiers.is_file_store_shared else own_files(name)
            known, first = self._files.get(store, set()), held.get(name, 0)
            reached = next((at for at in range(first, len(chain)) if chain[at] not in known), len(chain))
            if reached > first:
                tokens = min(reached * self._block_tokens, job.request.num_tokens)
                found[name] = Source(store, tokens, tiers.file_bandwidth, tiers.file_latency_s)
        return found

    def _candidate(self, member: KnownReplica, now: float) -> Candidate:
        report, service = member.report, self._scenario.service
        heard = now - self._scenario.load_delay
        queued = report.waiting_tokens + max(report.prefill_ends - heard, 0.0) * service.prefill_rate
        num_running, pages_free = report.num_running, report.pages_free
        sent = self._sent.get(member.name)
        if sent:
            while sent and sent[0][0] <= heard:
                sent.popleft()
            queued += sum(tokens for _, tokens in sent)
            num_running += len(sent)
        decoding = report.num_decoding
        return Candidate(
            replica=member.name,
            queued_prefill_tokens=queued,
            num_running=num_running,
            pages_free=pages_free,
            pages_total=member.num_pages,
            evict_price=evict_price(report.eviction_age, service.prefill_rate, self._reuse_s),
            prefill_rate=service.prefill_rate,
            decode_tokens_per_s=decoding / service.step_seconds(decoding) if decoding else 0.0,
            is_available=member.is_serving,
            page_size=self._block_tokens,
        )
