"""Decides how many engine replicas the work needs. Serve's controller calls `WorkPolicy` several times a second.

The engines' work shows only how much they can do: while ingresses hold requests back, every replica looks just
busy. So the need follows from the work that arrives, whether it is served, waits or is rejected:

    coming   prefill that is done + growth of the queues + rejected prefill      per second, in replicas
    pace     (waiting + coming * catch_up_s) / (catch_up_s + ttft_target_s), or coming, if that is more:
             prefill per second that leaves ttft_target_s of it waiting at each replica, catch_up_s from now

    needed   the largest of    pace
                               coming                                            / max_busy_share
                               KV memory in use * pace / prefill that is done    / max_kv_share

    more     ceil(needed), when that is above the target
    fewer    ceil(needed / (1 - headroom)), when that is below it: the replicas that stay have room to spare

Where prefill and decode are apart (`router/fetch/roles.py`), each is a deployment with its own policy and bounds:

    prefill  memory does not count: a prompt leaves it when it is computed, however many wait
    decode   the prompts of its streams are computed elsewhere, so the growth of its memory follows from requests:
             KV memory in use * requests that arrive / requests that end

The need is a sum over the fleet, so it does not depend on how many replicas share it: under constant work the
target moves once and then rests, because ceil(needed) <= ceil(needed / (1 - headroom)). Uneven queues are a task
for the router, not for more replicas. Serve applies its delays, factors and bounds to the result.

This module imports nothing of Raydix: Serve pickles it by value into its controller.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("ray.serve")

# Float sums are inexact: the work of 3 replicas must not ask for a fourth.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """One replica's mean work over the look-back. The fields are the keys of `record_autoscaling_stats`.

    It includes requests that wait in ingresses that report to this replica (`deployments/wire/backlogs.py`).
    """

    queued_prefill_s: float = 0.0
    """Seconds that prefill of the waiting prompts takes at the measured rate."""
    busy_share: float = 0.0
    """Tokens prefilled per second, as a share of the measured rate."""
    kv_share: float = 0.0
    """KV pages in use or waited for in the engine, as a share of all pages; or, if more, the same for places in
    its batch. Above 1 while some wait."""
    preemptions_per_s: float = 0.0
    """Requests preempted per second for lack of pages."""
    unserved_share: float = 0.0
    """Prompt tokens per second that arrived and were not prefilled, because they wait or were rejected, as a share
    of the measured rate. Negative while queues become shorter."""
    running: float = 0.0
    """Requests in the batch."""
    held_back: float = 0.0
    """Requests that wait in ingresses."""
    turned_away_per_s: float = 0.0
    """Requests that left an ingress per second without an engine."""
    finished_per_s: float = 0.0
    """Requests that ended per second."""
    unserved_per_s: float = 0.0
    """Requests per second that arrived and did not begin, because they wait or were rejected. Negative while
    queues become shorter."""


STATS = tuple(ReplicaWork.__dataclass_fields__)
"""Names of the stats that a replica must report to be counted."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The fields of `deployments.config.autoscaling.AutoscalingSettings` that state targets for each replica."""

    ttft_target_s: float = 1.0
    catch_up_s: float = 30.0
    max_busy_share: float = 0.85
    max_kv_share: float = 0.85
    headroom: float = 0.3


TARGETS = tuple(Targets.__dataclass_fields__)


def needed_replicas(targets: Targets, work: Sequence[ReplicaWork], role: str | None = None) -> float:
    """Return the unrounded number of replicas that would do this work at the targets. `role` is theirs, if any."""
    busy = sum(replica.busy_share for replica in work)
    waiting = sum(replica.queued_prefill_s for replica in work)
    coming = max(0.0, busy + sum(replica.unserved_share for replica in work))
    pace = _pace(targets, coming, waiting)
    prefill = max(pace, coming / targets.max_busy_share)
    if role == "prefill":
        return prefill
    if role == "decode":
        busy = sum(replica.finished_per_s for replica in work)
        coming = max(0.0, busy + sum(replica.unserved_per_s for replica in work))
        pace = _pace(targets, coming, sum(replica.held_back for replica in work))
    memory = sum(replica.kv_share for replica in work) * _growth_of_batches(pace, busy, targets.catch_up_s, work)
    return max(prefill, memory / targets.max_kv_share)


def _pace(targets: Targets, coming: float, waiting: float) -> float:
    """Return the work per second that keeps up with arrivals, and makes the queue short enough in time."""
    horizon = targets.catch_up_s
    return max(coming, (waiting + coming * horizon) / (horizon + targets.ttft_target_s))


def _growth_of_batches(pace: float, busy: float, horizon: float, work: Sequence[ReplicaWork]) -> float:
    """Return the factor by which concurrent requests would grow if work continued at `pace` instead of `busy`.

    Requests stay as long as they do now (Little's law). No more can run than run, wait or were rejected.
    """
    running = sum(replica.running for replica in work)
    if running < _ROUNDING:
        return 1.0
    outside = sum(replica.held_back + replica.turned_away_per_s * horizon for replica in work)
    return min(max(1.0, pace / busy) if busy else math.inf, 1.0 + outside / running)


def desired_replicas(
    targets: Targets, work: Sequence[ReplicaWork], num_running: int, target: int, role: str | None = None
) -> int:
    """Return the new target, given the present one, `target`.

    `work` is the work of those of `num_running` replicas that have reported. The others are new and idle: they do
    not change the need, but no replica is stopped before all have reported, nor while requests are preempted. The
    result never falls when work grows.
    """
    if not work:
        return target
    needed = needed_replicas(targets, work, role)
    if needed > target + _ROUNDING:
        return math.ceil(needed - _ROUNDING)
    fewer = math.ceil(needed / (1.0 - targets.headroom) - _ROUNDING)
    is_complete = len(work) >= num_running
    is_calm = all(replica.preemptions_per_s == 0 for replica in work)
    return fewer if fewer < target and is_complete and is_calm else target


class WorkPolicy:
    """A Serve autoscaling policy, constructed from its `policy_kwargs`.

    Serve 2.60 calls it with an `AutoscalingContext`; it returns the desired number of replicas and no state.
    """

    def __init__(self, least: int = 0, role: str | None = None, **targets: float) -> None:
        """`least` replicas are kept, except that an unloaded model has none until it is loaded again. `role` is
        the replicas' role: "prefill", "decode", or None for both.
        """
        self._least, self._role, self._targets = least, role, Targets(**targets)
        self._target: int | None = None

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Stay within the deployment's bounds, and at 1 or more while there is any request."""
        work = reported_work(context.aggregated_metrics or {})
        target = context.target_num_replicas
        desired = desired_replicas(self._targets, work, context.current_num_replicas, target, self._role)
        if context.total_num_requests > 0:
            desired = max(desired, 1)
        low = max(context.capacity_adjusted_min_replicas, self._least)
        high = context.capacity_adjusted_max_replicas
        desired = 0 if target == 0 < self._least else max(low, min(high, desired))
        self._log(target, work)
        return desired, {}

    def _log(self, target: int, work: Sequence[ReplicaWork]) -> None:
        """Log when Serve has carried out a decision; momentary wishes are no news."""
        before, self._target = self._target, target
        if before is not None and target != before:
            needed = needed_replicas(self._targets, work, self._role) if work else math.nan
            what = "engine" if self._role is None else self._role
            logger.info("%d %s replicas instead of %d: the work needs %.2f", target, what, before, needed)


def keep(context: Any) -> tuple[int, dict[str, Any]]:
    """Keep the target, for models whose number of replicas changes only by load and unload."""
    return context.target_num_replicas, {}


def reported_work(metrics: Mapping[str, Mapping[Any, float]]) -> list[ReplicaWork]:
    """Return the work of each replica that reported all stats. `metrics` has them by stat, then by replica."""
    known = [metrics.get(name, {}) for name in STATS]
    return [
        ReplicaWork(*(_sane(name, values[replica]) for name, values in zip(STATS, known, strict=True)))
        for replica in known[0]
        if all(replica in values for values in known)
    ]


def _sane(name: str, value: float) -> float:
    if not math.isfinite(value):
        return 0.0
    return value if name.startswith("unserved") else max(0.0, value)
