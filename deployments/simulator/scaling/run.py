"""A run: requests arrive at ingresses, and replicas boot, serve and drain as the policy decides.

    arrivals ─▶ SimulatedAdmission ─▶ SimulatedFleet ─── WorkMeter ───▶ SimulatedController ─┐
                      │   ▲                ▲                  ▲                              │
                      │   └─ load ─────────┤                  │                              │
                      └─ Backlog ──────────┼─────▶ Backlogs ──┘                              │
                                           └──── boots for boot_s, or drains ◀───────────────┘

Only the replicas, the network and time are simulated. `WorkPolicy`, `WorkMeter`, `Backlogs`, the queue of
admission, the router's policies and index and Serve's delays are those that run in production.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from deployments.client.remote_engines import BACKLOG_PERIOD_S
from deployments.config.autoscaling import AutoscalingSettings
from deployments.config.settings import AdmissionSettings
from deployments.replica.load import WorkMeter
from deployments.simulator.fleet.arrivals import Arrivals
from deployments.simulator.fleet.fleet import Action, SimulatedFleet
from deployments.simulator.fleet.replica import Job, SimulatedReplica
from deployments.simulator.fleet.scenario import Scenario
from deployments.simulator.scaling.admission import SimulatedAdmission
from deployments.simulator.scaling.controller import SimulatedController
from deployments.simulator.scaling.replicas import ReplicaSet
from deployments.simulator.scaling.result import ScalingResult, summarise_scaling
from deployments.wire.backlogs import Backlogs, BacklogTotals
from engine.scheduling.stats import StageSeconds, StepStats
from router.cost import REUSE_S
from router.policies import Policy

DECIDE_S = 1.0
"""Seconds between two decisions; Serve makes ten a second, from reports that come every other second."""
MAX_RUNNING = 1 << 20
"""Places in a simulated replica's batch: only its memory bounds the batch."""


@dataclass(frozen=True, slots=True)
class ScalingScenario:
    """Settings of a run, except the traffic and the routing policy."""

    fleet: Scenario
    """Replicas' speed and memory, and the delays of news. The number of replicas follows from `autoscaling`."""
    autoscaling: AutoscalingSettings
    boot_s: float = 60.0
    """Seconds from the decision to start a replica until it accepts requests: pod, weights, graphs, warm-up."""
    ttft_slo_s: float = 5.0
    """Longest time to first token that meets the objective."""
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    hears_ingresses: bool = True
    """Whether ingresses' reports arrive; without them the policy sees only the engines' requests."""

    def __post_init__(self) -> None:
        if self.boot_s < 0.0:
            raise ValueError(f"a replica takes at least 0 s to boot, got {self.boot_s}")
        if not self.ttft_slo_s > 0.0:
            raise ValueError(f"the objective for the time to first token must be above 0 s, got {self.ttft_slo_s}")


def simulate_scaling(
    name: str, offered: Arrivals, block_tokens: int, scenario: ScalingScenario, policy: Callable[[], Policy]
) -> ScalingResult:
    """Run the traffic. Deterministic: the same arguments give the same result."""
    run = _Run(offered, block_tokens, scenario, policy)
    jobs = run.play(offered)
    paid_s = run.replicas.seconds(offered.times[-1])
    return summarise_scaling(name, jobs, run.targets, paid_s, scenario.ttft_slo_s)


class _Run:
    def __init__(
        self, offered: Arrivals, block_tokens: int, scenario: ScalingScenario, policy: Callable[[], Policy]
    ) -> None:
        scaling = scenario.autoscaling
        self._scenario = scenario
        initial = max(1, scaling.min if scaling.initial is None else scaling.initial)
        shape = replace(scenario.fleet, num_replicas=initial)
        self._fleet = SimulatedFleet(block_tokens, shape, policy, REUSE_S / offered.compression, self._on_change)
        self._admissions = [
            SimulatedAdmission(self._fleet, ingress, scenario.admission) for ingress in range(shape.num_ingresses)
        ]
        self.replicas = ReplicaSet(self._fleet, initial, scenario.boot_s)
        self._controller = SimulatedController(scaling, initial)
        self._backlogs = Backlogs()
        self._meters: dict[int, _Meter] = {}
        self.targets = [(0.0, initial)]
        """Times of decisions, and the targets from then on."""
        self._every(BACKLOG_PERIOD_S, self._tell_backlogs)
        # Serve records at least five times in a look-back period.
        self._every(min(scaling.report_s, scaling.look_back_s / 5), self._record)
        self._every(DECIDE_S, self._decide)

    def play(self, offered: Arrivals) -> list[Job]:
        """Run all requests to their ends."""
        rng = random.Random(f"{self._scenario.fleet.seed}/entry")
        jobs: list[Job] = []
        for time, request in zip(offered.times, offered.requests, strict=True):
            self._fleet.run_until(time)
            job = self._fleet.new_job(request, rng.randrange(len(self._admissions)), time)
            jobs.append(job)
            if self._fleet.fits(job):
                self._admissions[job.ingress].arrive(job, time)
        end = offered.times[-1]
        while not (self.replicas.is_idle and all(admission.is_clear for admission in self._admissions)):
            end += DECIDE_S
            self._fleet.run_until(end)
        return jobs

    def _every(self, period: float, action: Action) -> None:
        def act(now: float) -> None:
            action(now)
            self._fleet.at(now + period, act)

        self._fleet.at(period, act)

    def _on_change(self, now: float) -> None:
        for admission in self._admissions:
            if not admission.is_clear:
                admission.give_turns(now)
        self.replicas.settle(now)

    def _tell_backlogs(self, now: float) -> None:
        for number, admission in enumerate(self._admissions):
            self._backlogs.take(f"ingress-{number}", admission.backlog(), now)

    def _record(self, now: float) -> None:
        """Have each replica report; the first one also reports the ingresses' backlogs."""
        told = self._backlogs.totals(now) if self._scenario.hears_ingresses else BacklogTotals()
        running = self.replicas.running
        for index in running:
            if index not in self._meters:
                self._meters[index] = _Meter(self._fleet.replica(index), now)  # it has nothing to report yet
                continue
            backlog = told if index == running[0] else BacklogTotals()
            self._controller.record(index, self._meters[index].read(backlog, now), now)

    def _decide(self, now: float) -> None:
        running = self.replicas.running
        target = self._controller.decide(running, now)
        if target != self.targets[-1][1]:
            self.targets.append((now, target))
        self.replicas.scale(target, now)


class _Meter:
    """A replica's real meter, which receives the simulated replica's work."""

    def __init__(self, replica: SimulatedReplica, now: float) -> None:
        self._replica, self._counted = replica, int(replica.prefilled_tokens(now))
        self._meter = WorkMeter(replica.engine_load(now).page_size, MAX_RUNNING, now)

    def read(self, backlog: BacklogTotals, now: float) -> dict[str, float]:
        """Return the replica's report on the time since the last reading."""
        done = int(self._replica.prefilled_tokens(now))
        self._meter.on_step(StepStats(StageSeconds(0.0), 0, 0, done - self._counted))
        self._counted = done
        return self._meter.read(self._replica.engine_load(now), backlog, now)
