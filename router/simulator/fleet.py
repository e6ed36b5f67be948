"""The event loop: requests arrive, ingresses place them, replicas work, replicas die."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from enum import IntEnum

from cache.prefix_hash import block_hashes, prefix_root
from router.cost import REUSE_S
from router.policies import Policy
from router.simulator.arrivals import Arrivals, arrivals
from router.simulator.ingress import CacheNews, KnownReplica, SimulatedIngress
from router.simulator.replica import NAMESPACE, Job, SimulatedReplica
from router.simulator.result import Result, summarise
from router.simulator.scenario import Scenario
from router.simulator.trace import Trace


class _Due(IntEnum):
    """Kind of an entry of the event queue."""

    WORK = 0
    KILL = 1
    RESTART = 2


def simulate(trace: Trace, scenario: Scenario, name: str, policy: Callable[[], Policy]) -> Result:
    """Run a trace through a fleet whose ingresses each create a policy of their own.

    Deterministic: the same arguments give the same result.
    """
    fleet_rate = scenario.num_replicas * scenario.service.prefill_rate
    offered = arrivals(trace, scenario.load, fleet_rate, scenario.seed)
    fleet = _Fleet(trace.block_tokens, scenario, policy, REUSE_S / offered.compression)
    jobs = fleet.run(offered)
    return summarise(name, scenario, jobs, fleet.prefill_seconds)


class _Fleet:
    def __init__(
        self, block_tokens: int, scenario: Scenario, policy: Callable[[], Policy], reuse_s: float
    ) -> None:
        self._reuse_s = reuse_s
        self._block_tokens = block_tokens
        self._scenario = scenario
        self._num_pages = max(scenario.cache_tokens // block_tokens, 1)
        self._names = [f"replica-{index}" for index in range(scenario.num_replicas)]
        self._index = {name: index for index, name in enumerate(self._names)}
        self._replicas = [self._new_replica(name, 0.0) for name in self._names]
        self._members = [KnownReplica(r.name, r.reports[0], self._num_pages) for r in self._replicas]
        self._by_name = {member.name: member for member in self._members}
        self.prefill_seconds = [0.0] * scenario.num_replicas
        """Prefill time by replica, including replicas that died."""
        self._ingresses = self._new_ingresses(policy)
        self._news: list[CacheNews] = []
        self._parked: list[Job] = []
        self._heap: list[tuple[float, int, _Due, int]] = []
        self._num_pushed = 0
        self._next_work = [float("inf")] * scenario.num_replicas

    def run(self, offered: Arrivals) -> list[Job]:
        """Run all requests, until the last one that can end has ended."""
        rng = random.Random(f"{self._scenario.seed}/entry")
        root, jobs = prefix_root(NAMESPACE), []
        for kill in self._scenario.kills:
            self._push(kill.time, _Due.KILL, kill.replica)
        for time, request in zip(offered.times, offered.requests, strict=True):
            self._run_until(time)
            chain = tuple(block_hashes(request.blocks, root, 1))
            job = Job(request, chain, rng.randrange(len(self._ingresses)), time)
            jobs.append(job)
            if self._replicas[0].fits(job):
                self._place(job, time)
        self._run_until(float("inf"))
        for index, replica in enumerate(self._replicas):
            self.prefill_seconds[index] += replica.prefill_seconds
        return jobs

    # Events

    def _run_until(self, time: float) -> None:
        while self._heap and self._heap[0][0] <= time:
            now, _, due, index = heapq.heappop(self._heap)
            if due is _Due.KILL:
                self._kill(index, now)
            elif due is _Due.RESTART:
                self._restart(index, now)
            elif self._next_work[index] == now:
                self._next_work[index] = float("inf")
                self._replicas[index].advance(now)
                self._changed(index, now)

    def _push(self, time: float, due: _Due, index: int) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (time, self._num_pushed, due, index))

    def _changed(self, index: int, now: float) -> None:
        """Plan a replica's next event and publish its news after it has changed."""
        replica = self._replicas[index]
        due = replica.next_event()
        if due != self._next_work[index]:
            self._next_work[index] = due
            if due != float("inf"):
                self._push(due, _Due.WORK, index)
        stored, evicted = replica.drain_news()
        if stored or evicted:
            self._news.append(CacheNews(now, replica.name, self._members[index].epoch, stored, evicted))

    # Requests

    def _place(self, job: Job, now: float) -> None:
        ingress = self._ingresses[job.ingress]
        if not any(member.is_alive for member in self._members):
            self._parked.append(job)
            return
        self._deliver_reports(now)
        ingress.hear(self._news, self._by_name, now)
        decision = ingress.place(job, self._members, now)
        job.regret_tokens = decision.regret_tokens
        index = self._index[decision.order[0]]
        self._replicas[index].submit(job, now)
        self._changed(index, now)

    def _deliver_reports(self, now: float) -> None:
        """Deliver each replica's latest report that has reached the delay of news."""
        until = now - self._scenario.load_delay
        for replica, member in zip(self._replicas, self._members, strict=True):
            reports = replica.reports
            while reports and reports[0].time <= until:
                member.report = reports.popleft()

    # Failures

    def _kill(self, index: int, now: float) -> None:
        """Kill a replica. Ingresses notice the broken connection at once, and place its requests again."""
        member, replica = self._members[index], self._replicas[index]
        if not member.is_alive:
            return
        member.is_alive = False
        member.epoch += 1
        self.prefill_seconds[index] += replica.prefill_seconds
        self._next_work[index] = float("inf")
        for ingress in self._ingresses:
            ingress.lose(replica.name)
        lost = replica.lose(now)
        self._replicas[index] = self._new_replica(replica.name, now)
        self._push(now + self._scenario.restart_s, _Due.RESTART, index)
        for job in lost:
            self._place(job, now)

    def _restart(self, index: int, now: float) -> None:
        replica, member = self._new_replica(self._names[index], now), self._members[index]
        self._replicas[index], member.report, member.is_alive = replica, replica.reports[0], True
        parked, self._parked = self._parked, []
        for job in parked:
            self._place(job, now)

    # Parts

    def _new_replica(self, name: str, now: float) -> SimulatedReplica:
        return SimulatedReplica(name, self._scenario.service, self._num_pages, self._block_tokens, now)

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
