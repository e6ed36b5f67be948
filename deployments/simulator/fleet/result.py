"""The figures of a simulation run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.simulator.fleet.replica import Job
from deployments.simulator.fleet.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Result:
    """One policy in one scenario. Times in seconds; NaN where no request had a first token."""

    policy: str
    num_replicas: int
    num_ingresses: int
    load: float
    num_requests: int
    hit_rate: float
    """Cached tokens as a share of all prompt tokens, as of each request's first admission."""
    host_share: float
    """Those of them that were only in the replica's host memory, of all prompt tokens."""
    file_share: float
    """Those that were read from files."""
    peer_share: float
    """Those that were fetched from another replica."""
    ttft_mean: float
    ttft_p50: float
    ttft_p95: float
    ttft_p99: float
    prefill_skew: float
    """Prefill work of the busiest replica over the mean."""
    utilisation: float
    """Prefill work as a share of what the fleet could have done while requests arrived."""
    regret_share: float
    """Tokens that the best known replica held and the chosen one did not, as a share of all prompt tokens."""
    num_spills: int
    """Requests with any regret."""
    num_moved: int
    """Requests placed again because their replica died."""
    num_failed: int
    """Requests without a first token: larger than a replica's memory, or no replica left."""


def summarise(policy: str, scenario: Scenario, jobs: Sequence[Job], prefill_seconds: Sequence[float]) -> Result:
    """Reduce a run to its figures."""
    waits = sorted(job.first_token_at - job.arrived for job in jobs if job.first_token_at is not None)
    num_tokens = max(sum(job.request.num_tokens for job in jobs if job.hit_tokens is not None), 1)
    mean_work = sum(prefill_seconds) / len(prefill_seconds)
    duration = jobs[-1].arrived - jobs[0].arrived if jobs else 0.0
    return Result(
        policy=policy,
        num_replicas=scenario.num_replicas,
        num_ingresses=scenario.num_ingresses,
        load=scenario.load,
        num_requests=len(jobs),
        hit_rate=sum(job.hit_tokens or 0 for job in jobs) / num_tokens,
        host_share=sum(job.host_tokens for job in jobs) / num_tokens,
        file_share=sum(job.file_tokens for job in jobs) / num_tokens,
        peer_share=sum(job.peer_tokens for job in jobs) / num_tokens,
        ttft_mean=sum(waits) / len(waits) if waits else math.nan,
        ttft_p50=percentile(waits, 0.50),
        ttft_p95=percentile(waits, 0.95),
        ttft_p99=percentile(waits, 0.99),
        prefill_skew=max(prefill_seconds) / mean_work if mean_work else 1.0,
        utilisation=mean_work / duration if duration else 0.0,
        regret_share=sum(job.regret_tokens for job in jobs) / num_tokens,
        num_spills=sum(job.regret_tokens > 0 for job in jobs),
        num_moved=sum(job.moves > 0 for job in jobs),
        num_failed=sum(job.first_token_at is None for job in jobs),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of sorted values that at least `share` of them do not exceed; NaN for none."""
    if not values:
        return math.nan
    return values[max(math.ceil(share * len(values)) - 1, 0)]
