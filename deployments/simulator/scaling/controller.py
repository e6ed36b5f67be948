"""Serve's controller, reduced to the scaling of one deployment: reports of replicas in, a target out.

    replicas ── stats, every report_s ──▶ mean over look_back_s ──▶ WorkPolicy ──▶ Serve's delays ──▶ target

The policy and the delays are the real ones, on simulated time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.config.autoscaling import AutoscalingSettings
from deployments.replica.autoscaling import TARGETS, WorkPolicy
from router.ray_internals import apply_scaling_delays

Stats = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ScalingContext:
    """The part of Serve's `AutoscalingContext` that the policy reads."""

    aggregated_metrics: Mapping[str, Mapping[int, float]]
    target_num_replicas: int
    current_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    total_num_requests: float = 1.0
    """Serve counts the calls by which ingresses watch replicas."""


class SimulatedController:
    """Stores replicas' reports, and decides how many replicas there should be. `now` never falls."""

    def __init__(self, settings: AutoscalingSettings, target: int) -> None:
        self.target = target
        self._settings = settings
        self._policy = WorkPolicy(settings.min, **settings.model_dump(include=set(TARGETS)))
        self._delays: dict[str, Any] = {}
        self._reports: dict[int, deque[tuple[float, Stats]]] = {}

    def record(self, replica: int, stats: Stats, now: float) -> None:
        """Store a replica's report. Decisions use it a period later: the replica first records, then sends."""
        reports = self._reports.setdefault(replica, deque())
        reports.append((now, stats))
        while reports[0][0] < now - self._settings.look_back_s:
            reports.popleft()

    def decide(self, running: Sequence[int], now: float) -> int:
        """Return the new target. Reports of replicas that no longer run do not count."""
        self._reports = {replica: self._reports[replica] for replica in running if replica in self._reports}
        context = ScalingContext(self._means(now), self.target, len(running), 0, self._settings.max)
        desired, _ = self._policy(context)
        self.target = apply_scaling_delays(desired, self.target, self._settings, self._delays, now)
        return self.target

    def _means(self, now: float) -> dict[str, dict[int, float]]:
        """Return each stat's mean by replica, as Serve computes it."""
        means: dict[str, dict[int, float]] = {}
        until = now - self._settings.report_s
        for replica, reports in self._reports.items():
            known = [report for report in reports if report[0] <= until]
            for name in known[0][1] if known else ():
                series = [(time, stats[name]) for time, stats in known]
                means.setdefault(name, {})[replica] = time_weighted_mean(series, now)
        return means


def time_weighted_mean(series: list[tuple[float, float]], now: float) -> float:
    """Return the mean, from the first time until now, of a value that stays constant between its changes."""
    ends = [*(time for time, _ in series[1:]), max(now, series[-1][0] + 1e-3)]
    total = sum(value * (end - time) for (time, value), end in zip(series, ends, strict=True))
    return total / (ends[-1] - series[0][0])
