"""The event loop: requests arrive, ingresses place them, replicas work, come, go and die."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cache.prefix_hash import block_hashes, prefix_root
from deployments.simulator.fleet.arrivals import Arrivals, arrivals
from deployments.simulator.fleet.departures import Departure, Figures, as_requests
from deployments.simulator.fleet.fetches import Fetches
from deployments.simulator.fleet.files import FileTier
from deployments.simulator.fleet.handovers import Handovers
from deployments.simulator.fleet.ingress import CacheNews, FileNews, KnownReplica, SimulatedIngress
from deployments.simulator.fleet.replica import NAMESPACE, Job, SimulatedReplica
from deployments.simulator.fleet.result import Result, summarise
from deployments.simulator.fleet.scenario import AnnouncedEnd, Scenario
from deployments.simulator.fleet.trace import Trace, TraceRequest
from router.cost import REUSE_S
from router.fetch.fetching import Source
from router.fetch.hot_prefixes import HotPrefix, HotPrefixes
from router.fetch.worth_moving import NUM_AT_ONCE
from router.policies import Policy

Action = Callable[[float], None]
"""An event, called with its time."""


def simulate(trace: Trace, scenario: Scenario, name: str, policy: Callable[[], Policy]) -> Result:
    """Run a trace through a fleet whose ingresses each create a policy of their own.

    Deterministic: the same arguments give the same result.
    """
    fleet_rate = scenario.num_replicas * scenario.service.prefill_rate
    offered = arrivals(trace, scenario.load, fleet_rate, scenario.seed)
    fleet = SimulatedFleet(trace.block_tokens, scenario, policy, REUSE_S / offered.compression)
    jobs = fleet.run(offered)
    return summarise(name, scenario, jobs, fleet.prefill_seconds)


@dataclass(slots=True, eq=False)
class _Place:
    """A replica, or its successor after it died, and what ingresses know of it."""

    replica: SimulatedReplica
    member: KnownReplica
    next_work: float = math.inf
    """Time of the replica's next event that is in the queue."""
    earlier_prefill_s: float = 0.0
    """Prefill time of its predecessors."""


class SimulatedFleet:
    """Replicas and ingresses on one clock, which advances in `run_until`."""

    def __init__(
        self,
        block_tokens: int,
        scenario: Scenario,
        policy: Callable[[], Policy],
        reuse_s: float,
        on_change: Action = lambda _: None,
    ) -> None:
        """`reuse_s`: REUSE_S on the simulation's clock. `on_change` is called after each event of a replica."""
        scenario.tiers.check(block_tokens)
        self._reuse_s, self._on_change = reuse_s, on_change
        self._block_tokens = block_tokens
        self._scenario = scenario
        self._num_pages = max(scenario.cache_tokens // block_tokens, 1)
        self._places: list[_Place] = []
        self._known: list[_Place] = []  # without those that have left
        self._index: dict[str, int] = {}
        self._members: dict[str, KnownReplica] = {}
        self._ingresses = self._new_ingresses(policy)
        self._news: list[CacheNews | FileNews] = []
        self._fetches = Fetches(scenario.tiers, block_tokens, self._fetched, self._written)
        self._handovers = Handovers(
            self._fetches.links, block_tokens * scenario.tiers.kv_bytes_per_token, scenario.tiers.peer_latency_s,
            self._fetched, self.submit,
        )  # fmt: skip
        self._departures: dict[str, Departure] = {}
        self._is_departing = False
        self._coming: list[tuple[Job, str, int]] = []
        self._received: dict[int, str] = {}  # blocks that were handed over and not used since, and where they are
        self.figures = Figures()
        self._hot = HotPrefixes(1, half_life_s=2 * reuse_s)
        self._next_transfer = math.inf
        self._parked: list[Job] = []
        self._heap: list[tuple[float, int, Action]] = []
        self._num_pushed = 0
        self._root = prefix_root(NAMESPACE)
        for _ in range(scenario.num_replicas):
            self.join(0.0)

    def run(self, offered: Arrivals) -> list[Job]:
        """Run all requests, until the last one that can end has ended."""
        rng = random.Random(f"{self._scenario.seed}/entry")
        jobs = []
        for kill in self._scenario.kills:
            self.at(kill.time, partial(self._kill, kill.replica))
        for notice in self._scenario.notices:
            self.at(notice.time, partial(self._announce, notice))
        for time, request in zip(offered.times, offered.requests, strict=True):
            self.run_until(time)
            job = self.new_job(request, rng.randrange(len(self._ingresses)), time)
            jobs.append(job)
            if self.fits(job):
                if self._scenario.notices:
                    self._hot.record(NAMESPACE, request.blocks, job.chain, time)
                self.submit(job, time)
        self.run_until(math.inf)
        return jobs

    @property
    def prefill_seconds(self) -> list[float]:
        """Prefill time of each replica, including its predecessors that died."""
        return [place.earlier_prefill_s + place.replica.prefill_seconds for place in self._places]

    # Events

    def at(self, time: float, action: Action) -> None:
        """Schedule an action."""
        self._num_pushed += 1
        heapq.heappush(self._heap, (time, self._num_pushed, action))

    def run_until(self, time: float) -> None:
        """Process all events that are due by a time."""
        while self._heap and self._heap[0][0] <= time:
            now, _, action = heapq.heappop(self._heap)
            action(now)

    def _work(self, index: int, now: float) -> None:
        place = self._places[index]
        if place.next_work == now:  # otherwise the replica has changed since
            place.next_work = math.inf
            for job in place.replica.advance(now):
                self._ingresses[job.ingress].finish(job, place.replica.name)
                self._count_used(job, place.replica.name)
            self._changed(index, now)
            self._on_change(now)

    def _changed(self, index: int, now: float) -> None:
        """Plan a replica's next event and publish its news after it has changed."""
        place = self._places[index]
        due = place.replica.next_event()
        if due != place.next_work:
            place.next_work = due
            if due != math.inf:
                self.at(due, partial(self._work, index))
        stored, evicted = place.replica.drain_news()
        if stored or evicted:
            self._news.append(CacheNews(now, place.replica.name, place.member.epoch, stored, evicted))
        self._fetches.write(place.replica, now)
        for job in place.replica.drain_leaving():
            receiver = self._places[self._index[job.decodes_at or ""]]
            self._handovers.begin(job, place.replica, receiver.replica if receiver.member.is_alive else None, now)
        self._handovers.retry(place.replica, now)
        self._hand_over(now)
        self._plan_transfers()

    # Transfers

    def _fetched(self, replica: SimulatedReplica, now: float) -> None:
        self._changed(self._index[replica.name], now)

    def _written(self, store: str, files: FileTier, now: float) -> None:
        self._news.append(FileNews(now, store, *files.drain_news()))

    def _plan_transfers(self) -> None:
        due = self._fetches.links.next_event()
        if due != self._next_transfer:
            self._next_transfer = due
            if due != math.inf:
                self.at(due, self._move_transfers)

    def _move_transfers(self, now: float) -> None:
        if self._next_transfer == now:  # otherwise the transfers have changed since
            self._next_transfer = math.inf
            self._fetches.links.advance(now)
            self._plan_transfers()

    # Requests

    def new_job(self, request: TraceRequest, ingress: int, now: float) -> Job:
        """Return the job of a request that arrives now at one of the ingresses."""
        return Job(request, tuple(block_hashes(request.blocks, self._root, 1)), ingress, now)

    def fits(self, job: Job) -> bool:
        """Whether the request can ever run on a replica."""
        return self._places[0].replica.fits(job)

    def submit(self, job: Job, now: float) -> None:
        """Have the request's ingress place it; it waits while no replica accepts any."""
        if not any(place.member.is_serving for place in self._known):
            self._parked.append(job)
            return
        ingress = self._informed(job.ingress, now)
        among = self._among(job, ingress, now)
        decision, source = ingress.place(job, [place.member for place in self._known], now, among)
        job.regret_tokens = decision.regret_tokens
        index = self._index[decision.order[0]]
        replica = self._places[index].replica
        if source is not None:
            self._fetches.begin(job, replica, source, now)
        replica.submit(job, now)
        self._changed(index, now)

    def _among(self, job: Job, ingress: SimulatedIngress, now: float) -> Collection[str] | None:
        """Return the replicas that may compute a request, and set where it decodes if that is elsewhere.

        With no replica left for one of the roles, all replicas do both.
        """
        job.decodes_at = None
        roles = self._scenario.roles
        if roles is None:
            return None
        serving = [place.member for place in self._known if place.member.is_serving]
        prefill = {one.name for one in serving if self._index[one.name] < roles.prefill}
        decode = {one.name: one for one in serving if one.name not in prefill}
        if not prefill or not decode:
            return None
        if job.emitted or ingress.uncached_tokens(job, now, decode) <= roles.apart_above_tokens:
            return decode
        job.decodes_at = ingress.decoder(job, list(decode.values()), now)
        return prefill

    def shortest_queue(self, ingress: int, now: float) -> float:
        """Return the seconds until a new prompt would start, as an ingress knows; 0 without any replica."""
        return self._informed(ingress, now).shortest_queue([place.member for place in self._known], now)

    def uncached_tokens(self, job: Job, now: float) -> int:
        """Return the prompt tokens that the best holder would compute, as the job's ingress knows."""
        return self._informed(job.ingress, now).uncached_tokens(job, now)

    def _informed(self, ingress: int, now: float) -> SimulatedIngress:
        """Return an ingress after it has received the news that are older than their delays."""
        until = now - self._scenario.load_delay
        for place in self._known:
            reports = place.replica.reports
            while reports and reports[0].time <= until:
                place.member.report = reports.popleft()
        self._ingresses[ingress].hear(self._news, self._members, now)
        return self._ingresses[ingress]

    # Replicas that join, leave and die

    def join(self, now: float) -> int:
        """Add a replica that serves from now on, and return its number."""
        index = len(self._places)
        replica = self._new_replica(f"replica-{index}", now)
        member = KnownReplica(replica.name, replica.reports[0], self._num_pages)
        self._places.append(_Place(replica, member))
        self._known.append(self._places[-1])
        self._index[replica.name] = index
        self._members[replica.name] = member
        self._unpark(now)
        return index

    def drain(self, index: int) -> None:
        """Send a replica no more requests."""
        self._places[index].member.is_draining = True

    def leave(self, index: int) -> None:
        """Remove a replica without requests."""
        place = self._places[index]
        place.member.is_alive = False
        place.member.epoch += 1
        self._known.remove(place)
        for ingress in self._ingresses:
            ingress.lose(place.replica.name)

    def replica(self, index: int) -> SimulatedReplica:
        """Return a replica by its number."""
        return self._places[index].replica

    # Announced ends

    def _announce(self, notice: AnnouncedEnd, now: float) -> None:
        """Have a replica take no new requests and hand over what it has, until its machine ends."""
        place, scenario = self._places[notice.replica], self._scenario
        if not place.member.is_serving:
            return
        place.member.is_draining = True
        name, tiers, seed = place.replica.name, scenario.tiers, f"{scenario.seed}/{notice.time}"
        rate = (tiers.peer_bandwidth or 1.0) / tiers.kv_bytes_per_token / NUM_AT_ONCE
        alone = self._only_held_by(name, now)
        prefixes = as_requests(alone, self._chain, self._block_tokens, rate, self._reuse_s, now)
        finish_rate, ends_at = place.replica.num_finished / max(now, 1.0), now + notice.grace_s
        self._departures[name] = Departure(
            place.replica, ends_at, scenario.hand_over, prefixes, rate, random.Random(seed), finish_rate
        )
        self.at(ends_at, partial(self._end, notice.replica))
        self._changed(notice.replica, now)

    def _only_held_by(self, replica: str, now: float) -> list[HotPrefix]:
        """Return what is lost with a replica, as `WorthHolding` in the router does."""
        ingress, alone = self._informed(0, now), []
        others = [place.member.name for place in self._known if place.member.is_serving]
        for prefix in self._hot.top(self._scenario.keep_tokens // self._block_tokens, now):
            blocks = tuple(prefix.token_ids)
            held = ingress.held_blocks(self._chain(blocks), now)
            elsewhere = max((held.get(name, 0) for name in others), default=0)
            if held.get(replica, 0) > elsewhere:
                alone.append(replace(prefix, token_ids=prefix.token_ids[: held[replica]], elsewhere=elsewhere))
        return alone

    def _chain(self, blocks: Sequence[int]) -> tuple[int, ...]:
        return tuple(block_hashes(blocks, self._root, 1))

    def _hand_over(self, now: float) -> None:
        """Begin the transfers of leaving replicas for which there is room."""
        if not self._departures or self._is_departing:
            return
        if not any(place.member.is_serving for place in self._known):
            return
        self._is_departing = True
        self._take_in()
        for departure in self._departures.values():
            sender = departure.replica
            departure.begin(
                now,
                lambda job: job.fetching is not None or self._handovers.is_open(job),
                partial(self._move_stream, sender, now),
                partial(self._move_prefix, sender, now),
            )
        self._is_departing = False

    def _move_stream(self, sender: SimulatedReplica, now: float, job: Job) -> None:
        sender.send_away(job, now)
        job.decodes_at = self._receiver(job, now).name
        self.figures.num_streams += 1
        self.figures.stream_tokens += job.num_tokens
        self._handovers.begin(job, sender, self._places[self._index[job.decodes_at]].replica, now)
        self._changed(self._index[sender.name], now)

    def _move_prefix(self, sender: SimulatedReplica, now: float, job: Job) -> None:
        receiver = self._receiver(job, now)
        first = receiver.held_blocks(job)
        self._fetches.begin(job, receiver, Source(sender.name, job.num_tokens, 1.0, 0.0), now)
        if job.fetching is not None:
            self._coming.append((job, receiver.name, first))
        self._changed(self._index[receiver.name], now)

    def _take_in(self) -> None:
        """Count the prefixes that have arrived."""
        for job, receiver, first in self._coming:
            if job.fetching is None and job.peer_tokens:
                self.figures.prefix_tokens += job.peer_tokens
                self._received.update(dict.fromkeys(job.chain[first : job.num_coming], receiver))
        self._coming = [each for each in self._coming if each[0].fetching is not None]

    def _receiver(self, job: Job, now: float) -> SimulatedReplica:
        decision, _ = self._informed(job.ingress, now).place(job, [each.member for each in self._known], now)
        return self._places[self._index[decision.order[0]]].replica

    def _count_used(self, job: Job, replica: str) -> None:
        """Count the blocks of a prompt that its replica had because they were handed over."""
        num_found = (job.hit_tokens or 0) // self._block_tokens
        for number, block in enumerate(job.chain if self._received else ()):
            if (receiver := self._received.pop(block, None)) is not None:
                self.figures.used_tokens += self._block_tokens * (number < num_found and receiver == replica)

    def _end(self, index: int, now: float) -> None:
        """End a replica whose time is up."""
        place = self._places[index]
        del self._departures[place.replica.name]
        place.member.is_draining = False
        for job in place.replica.decoding(now):
            self.figures.num_lost += 1
            self.figures.lost_tokens += job.num_tokens
        self._kill(index, now)

    # Failures

    def _kill(self, index: int, now: float) -> None:
        """Kill a replica. Ingresses notice the broken connection immediately, and place its requests again."""
        place = self._places[index]
        member, replica = place.member, place.replica
        if not member.is_alive:
            return
        member.is_alive = False
        member.epoch += 1
        place.earlier_prefill_s += replica.prefill_seconds
        place.next_work = math.inf
        for ingress in self._ingresses:
            ingress.lose(replica.name)
        lost = self._handovers.lose(replica, now)
        self._fetches.lose(replica.name, now)
        lost += replica.lose(now)
        place.replica = self._new_replica(replica.name, now)
        self.at(now + self._scenario.restart_s, partial(self._restart, index))
        for job in lost:
            self.submit(job, now)

    def _restart(self, index: int, now: float) -> None:
        place = self._places[index]
        place.replica = replica = self._new_replica(place.replica.name, now)
        place.member.report, place.member.is_alive = replica.reports[0], True
        self._unpark(now)

    def _unpark(self, now: float) -> None:
        parked, self._parked = self._parked, []
        for job in parked:
            self.submit(job, now)

    # Parts

    def _new_replica(self, name: str, now: float) -> SimulatedReplica:
        scenario = self._scenario
        replica = SimulatedReplica(
            name, scenario.service, self._num_pages, self._block_tokens, now, tiers=scenario.tiers
        )
        self._fetches.join(replica)
        return replica

    def _new_ingresses(self, policy: Callable[[], Policy]) -> list[SimulatedIngress]:
        first = policy()
        is_shared = getattr(first, "is_shared", False)
        policies = [first, *(first if is_shared else policy() for _ in range(self._scenario.num_ingresses - 1))]
        return [
            SimulatedIngress(
                each, self._scenario, self._block_tokens, self._reuse_s, f"{self._scenario.seed}/ingress/{index}"
            )
            for index, each in enumerate(policies)
        ]
