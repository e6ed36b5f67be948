"""The figures of a run: how many requests met the objective, and the cost of the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.simulator.fleet.replica import Job
from deployments.simulator.fleet.result import percentile


@dataclass(frozen=True, slots=True)
class ScalingResult:
    """One setting under one traffic. Times in seconds; NaN where no request had a first token."""

    setting: str
    num_requests: int
    attainment: float
    """Share of the requests whose first token came within the objective."""
    ttft_p50: float
    """Among the requests that received a first token, like the other percentile."""
    ttft_p95: float
    turned_away: float
    """Share of the requests that received no first token, because admission refused them."""
    replica_hours: float
    """From the decision to start each replica until it has drained, while requests arrive."""
    targets: Sequence[tuple[float, int]]
    """Times of decisions, and the target number of replicas from then on; the first is the beginning."""

    @property
    def most(self) -> int:
        """The highest target."""
        return max(target for _, target in self.targets)


def summarise_scaling(
    setting: str, jobs: Sequence[Job], targets: Sequence[tuple[float, int]], replica_s: float, ttft_slo_s: float
) -> ScalingResult:
    """Reduce a run to its figures."""
    waits = sorted(job.first_token_at - job.arrived for job in jobs if job.first_token_at is not None)
    return ScalingResult(
        setting=setting,
        num_requests=len(jobs),
        attainment=sum(wait <= ttft_slo_s for wait in waits) / len(jobs),
        ttft_p50=percentile(waits, 0.50),
        ttft_p95=percentile(waits, 0.95),
        turned_away=1.0 - len(waits) / len(jobs),
        replica_hours=replica_s / 3600,
        targets=targets,
    )
