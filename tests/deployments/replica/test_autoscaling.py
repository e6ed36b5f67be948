"""The autoscaling policy, driven with series of replicas' reports; the target follows its decisions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve.autoscaling_policy import _apply_autoscaling_config

from deployments.app import _autoscaling
from deployments.config.autoscaling import AutoscalingSettings
from deployments.config.roles import Pool
from deployments.replica.autoscaling import (
    STATS,
    ReplicaWork,
    Targets,
    desired_replicas,
    needed_replicas,
    reported_work,
)
from router.fetch.roles import ROLES, Role

TARGETS = Targets(ttft_target_s=1.0, catch_up_s=30.0, max_busy_share=0.8, max_kv_share=0.8, headroom=0.25)

amounts = st.floats(0, 50, allow_nan=False)
in_engines = st.builds(ReplicaWork, amounts, st.floats(0, 1), st.floats(0, 3), st.sampled_from([0.0, 0.5]))
works = st.builds(
    ReplicaWork,
    amounts,
    st.floats(0, 1),
    st.floats(0, 3),
    st.sampled_from([0.0, 0.5]),
    unserved_share=st.floats(-1, 30),
    running=st.floats(0, 64),
    held_back=st.floats(0, 5000),
    turned_away_per_s=st.floats(0, 500),
    finished_per_s=st.floats(0, 20),
    unserved_per_s=st.floats(-20, 500),
)
roles = st.sampled_from([None, "prefill", "decode"])
outside = st.builds(
    ReplicaWork,
    amounts,
    unserved_share=st.floats(0, 30),
    held_back=st.floats(0, 5000),
    turned_away_per_s=st.floats(0, 500),
    unserved_per_s=st.floats(0, 500),
)


def plus(some: ReplicaWork, more: ReplicaWork) -> ReplicaWork:
    return ReplicaWork(*(getattr(some, name) + getattr(more, name) for name in STATS))


def spread(total: ReplicaWork, count: int) -> list[ReplicaWork]:
    """Spread a fleet's work evenly over its replicas."""
    return [ReplicaWork(*(getattr(total, name) / count for name in STATS))] * count


def follow(series: Iterable[ReplicaWork], target: int = 1, low: int = 1, high: int = 10) -> list[int]:
    """The target after each moment in a series of the fleet's work; replicas start and stop instantly."""
    targets = []
    for total in series:
        work = spread(total, target) if target else []
        target = max(low, min(high, desired_replicas(TARGETS, work, target, target)))
        targets.append(target)
    return targets


def num_changes(targets: Sequence[int]) -> int:
    return sum(a != b for a, b in itertools.pairwise(targets))


def busy(share: float) -> ReplicaWork:
    return ReplicaWork(busy_share=share)


def test_a_ramp_is_followed_up_without_a_step_back() -> None:
    targets = follow(busy(step / 10) for step in range(60))
    assert targets == sorted(targets)
    assert targets[-1] == math.ceil(5.9 / 0.8)


def test_a_spike_of_queued_prefill_calls_replicas_and_its_end_lets_them_go() -> None:
    quiet, spike = busy(0.5), ReplicaWork(queued_prefill_s=150.0, busy_share=1.0)
    targets = follow([quiet] * 5 + [spike] * 3 + [quiet] * 5)
    assert targets == [1] * 5 + [math.ceil((150 + 30) / 31)] * 3 + [1] * 5


def test_kv_memory_by_itself_raises_the_number_of_replicas() -> None:
    assert follow([ReplicaWork(kv_share=2.5)]) == [math.ceil(2.5 / 0.8)]


def test_idle_goes_down_to_the_least_and_only_without_any_work_to_none() -> None:
    assert follow([ReplicaWork()], target=5) == [1]
    assert follow([ReplicaWork()], target=5, low=0) == [0]
    assert follow([busy(0.01)], target=5, low=0) == [1]


def test_noise_within_the_headroom_does_not_flap() -> None:
    rng = random.Random(5)
    targets = follow(busy(2.7 * rng.uniform(0.87, 1.13)) for _ in range(500))
    assert num_changes(targets[10:]) == 0


def test_the_way_down_keeps_headroom_where_the_way_up_does_not() -> None:
    assert follow([busy(2.3)], target=3) == [3]  # 2.875 are needed
    assert follow([busy(2.3)], target=4) == [4]  # 3 would do, with less than a quarter to spare
    assert follow([busy(1.7)], target=4) == [3]


def test_one_hot_replica_is_left_to_the_router_until_the_fleet_is_short() -> None:
    cold = ReplicaWork(busy_share=0.5)
    hot = ReplicaWork(queued_prefill_s=20.0, busy_share=1.0)
    assert desired_replicas(TARGETS, [hot, cold, cold, cold], 4, 4) == 4
    hotter = replace(hot, queued_prefill_s=100.0)
    assert desired_replicas(TARGETS, [hotter, cold, cold, cold], 4, 4) == math.ceil((100 + 2.5 * 30) / 31)


def test_a_starting_replica_without_stats_changes_nothing_but_forbids_going_down() -> None:
    light = [busy(0.1)] * 2
    assert desired_replicas(TARGETS, light, 2, 3) == 1
    assert desired_replicas(TARGETS, light, 3, 3) == 3
    heavy = [busy(1.0)] * 2
    assert desired_replicas(TARGETS, heavy, 3, 3) == 3  # 2.5 are needed and 3 are coming
    assert desired_replicas(TARGETS, heavy, 2, 2) == 3


def test_nothing_known_changes_nothing() -> None:
    assert desired_replicas(TARGETS, [], 0, 4) == 4


def test_a_fleet_that_preempts_does_not_shrink() -> None:
    thrashing = [ReplicaWork(kv_share=0.2, preemptions_per_s=0.1), ReplicaWork(kv_share=0.2)]
    assert desired_replicas(TARGETS, thrashing, 2, 2) == 2
    assert desired_replicas(TARGETS, [replace(w, preemptions_per_s=0) for w in thrashing], 2, 2) == 1


@given(works, st.integers(1, 20))
@example(ReplicaWork(kv_share=1.0, running=1e-311, turned_away_per_s=1.0), 1)
def test_constant_work_moves_the_target_once_and_never_again(total: ReplicaWork, target: int) -> None:
    assert num_changes(follow([total] * 6, target, high=10**6)) == 0


fleets = st.lists(works, min_size=1, max_size=8)


@given(fleets, outside, st.integers(0, 7), st.integers(1, 20), st.integers(0, 12), roles)
def test_more_that_waits_comes_or_is_turned_away_never_means_fewer_replicas(
    fleet: list[ReplicaWork], more: ReplicaWork, where: int, target: int, num_running: int, role: Role | None
) -> None:
    where %= len(fleet)
    grown = [*fleet[:where], plus(fleet[where], more), *fleet[where + 1 :]]
    before, after = (desired_replicas(TARGETS, work, num_running, target, role) for work in (fleet, grown))
    assert after >= before


@given(st.lists(in_engines, min_size=1, max_size=8), in_engines, st.integers(0, 7), st.integers(1, 20), roles)
def test_more_work_in_engines_never_means_fewer_replicas(
    fleet: list[ReplicaWork], more: ReplicaWork, where: int, target: int, role: Role | None
) -> None:
    where %= len(fleet)
    grown = [*fleet[:where], plus(fleet[where], more), *fleet[where + 1 :]]
    before, after = (desired_replicas(TARGETS, work, len(fleet), target, role) for work in (fleet, grown))
    assert after >= before


@given(st.lists(works, max_size=8), st.integers(0, 20), roles)
def test_the_desired_number_is_at_least_the_needed_one(
    fleet: list[ReplicaWork], target: int, role: Role | None
) -> None:
    desired = desired_replicas(TARGETS, fleet, len(fleet), target, role)
    if fleet:
        assert desired >= needed_replicas(TARGETS, fleet, role) - 1e-6
    assert desired >= 0


# --- what ingresses hold back ----------------------------------------------------------------------------------

SATURATED = ReplicaWork(busy_share=1.0, kv_share=0.4, running=20.0)
"""One of four replicas in the tenfold burst: as busy as it can be, and with no queue of its own."""
TEN_TIMES = 10 * 4 * 0.8
"""What comes in the burst, in replicas: ten times what keeps four of them 80 % busy."""


def burst(waiting_s: float = 120.0, held_back: float = 120.0, turned_away_per_s: float = 0.0) -> list[ReplicaWork]:
    """Four replicas, the first of which the ingresses report to. `waiting_s` of prefill waits there."""
    reports = ReplicaWork(
        queued_prefill_s=waiting_s,
        unserved_share=TEN_TIMES - 4.0,
        held_back=held_back,
        turned_away_per_s=turned_away_per_s,
    )
    return [plus(SATURATED, reports), SATURATED, SATURATED, SATURATED]


def test_four_replicas_ask_for_all_that_a_tenfold_burst_needs_in_one_decision() -> None:
    assert desired_replicas(TARGETS, [SATURATED] * 4, 4, 4) == 5  # as if there were no queue before them
    assert desired_replicas(TARGETS, burst(), 4, 4) == math.ceil(TEN_TIMES / 0.8)


def test_requests_that_are_turned_away_count_as_much_as_those_that_wait() -> None:
    """The queue is full and does not grow: all that is too much is refused at the door."""
    assert desired_replicas(TARGETS, burst(held_back=50.0, turned_away_per_s=30.0), 4, 4) == 40


def test_a_backlog_is_worked_off_within_the_time_to_catch_up() -> None:
    assert desired_replicas(TARGETS, burst(waiting_s=600.0), 4, 4) == math.ceil((600 + TEN_TIMES * 30) / 31)
    strict = replace(TARGETS, catch_up_s=0.0)
    assert desired_replicas(strict, burst(waiting_s=600.0), 4, 4) == 600


def test_a_fleet_that_catches_up_asks_for_no_more_than_comes() -> None:
    """40 replicas work at their limit on what waits, and it becomes less."""
    catching_up = ReplicaWork(busy_share=1.0, running=20.0)
    shrinking = ReplicaWork(queued_prefill_s=100.0, unserved_share=TEN_TIMES - 40)
    work = [plus(catching_up, shrinking), *[catching_up] * 39]
    assert desired_replicas(TARGETS, work, 40, 40) == 40


def test_when_memory_is_short_batches_grow_with_the_arrivals() -> None:
    """Long answers: batches are full at a quarter of the prefill rate, and three times as much comes."""
    full = ReplicaWork(busy_share=0.25, kv_share=1.0, running=64.0)
    reports = ReplicaWork(unserved_share=2.0, queued_prefill_s=3.0, held_back=400.0, turned_away_per_s=20.0)
    work = [plus(full, reports), full, full, full]
    assert needed_replicas(TARGETS, work) == pytest.approx(4.0 * 3 / 0.8)
    # No more can run at once than there are, however little prefill was done.
    stuck = [replace(one, busy_share=one.busy_share / 1000) for one in work]
    assert needed_replicas(TARGETS, stuck) == pytest.approx(4.0 * (1 + (400 + 20 * 30) / 256) / 0.8)


def test_a_burst_asks_for_no_more_than_the_most_and_is_no_reason_to_stop_any() -> None:
    policy, config = serve_policy(min=4, upscale_delay_s=0, downscale_delay_s=0)
    assert policy(context(config, burst(), 4, {}))[0] == 8
    assert policy(context(config, burst(), 8, {}, current_num_replicas=4))[0] == 8


# --- prefill and decode apart ------------------------------------------------------------------------------------


def test_prompts_that_wait_for_prefill_need_time_and_no_memory() -> None:
    """Their tokens would fill the memory five times if all of them ran at once, but they come one by one."""
    waiting = ReplicaWork(queued_prefill_s=40.0, busy_share=0.9, kv_share=5.0)
    assert needed_replicas(TARGETS, [waiting], "prefill") == pytest.approx((40 + 0.9 * 30) / 31)
    assert needed_replicas(TARGETS, [waiting]) == pytest.approx(5.0 / 0.8)


def test_streams_need_memory_and_the_prompts_that_are_computed_elsewhere_nothing() -> None:
    full = ReplicaWork(busy_share=0.02, kv_share=0.9, running=60.0, finished_per_s=2.0)
    assert needed_replicas(TARGETS, [full] * 2, "decode") == pytest.approx(1.8 / 0.8)
    assert needed_replicas(TARGETS, [full] * 2, "prefill") == pytest.approx(0.04 / 0.8)


def test_a_burst_of_streams_is_answered_with_one_decision() -> None:
    """Four times as many requests come as end. Their prompts go apart, so of their tokens nothing waits here."""
    full = ReplicaWork(busy_share=0.02, kv_share=1.0, running=60.0, finished_per_s=2.0)
    turned_away = [plus(full, ReplicaWork(turned_away_per_s=12.0, unserved_per_s=12.0)), full]
    assert needed_replicas(TARGETS, turned_away, "decode") == pytest.approx(2.0 * 16 / 4 / 0.8)
    assert needed_replicas(TARGETS, turned_away) == pytest.approx(2.0 / 0.8), "by tokens nothing is coming"
    # No more can run at once than there are, however few have ended.
    waiting = [plus(full, ReplicaWork(held_back=300.0, unserved_per_s=12.0)), full]
    for work in (waiting, [replace(one, finished_per_s=0.0) for one in waiting]):
        assert needed_replicas(TARGETS, work, "decode") == pytest.approx(2.0 * (1 + 300 / 120) / 0.8)
    catching_up = [plus(full, ReplicaWork(held_back=30.0, unserved_per_s=-3.0)), full]
    assert needed_replicas(TARGETS, catching_up, "decode") == pytest.approx(2.0 / 0.8)


def test_each_side_scales_by_its_own_work() -> None:
    """As Serve calls it: the same reports, of prompts alone or of streams alone, move one side only."""
    prompts = [ReplicaWork(queued_prefill_s=90.0, busy_share=1.0, kv_share=0.1, running=1.0)]
    streams = [ReplicaWork(kv_share=2.5, busy_share=0.05, running=64.0, finished_per_s=3.0)]
    wanted: dict[Role, list[int]] = {}
    for role in ROLES:
        policy, config = serve_policy(role, upscale_delay_s=0, downscale_delay_s=0)
        wanted[role] = [policy(context(config, work, 1, {}))[0] for work in (prompts, streams)]
    assert wanted["prefill"] == [math.ceil((90 + 30) / 31), 1]
    assert wanted["decode"][1] == math.ceil(2.5 / 0.85)


# --- as Serve calls it -------------------------------------------------------------------------------------------


def serve_policy(
    role: Role | None = None, **settings: Any
) -> tuple[Callable[[Any], tuple[int, dict[str, Any]]], Any]:
    """The policy as the controller runs it, with Serve's own pickling and delays, and Serve's config."""
    config = _autoscaling(Pool(role, AutoscalingSettings(max=8, **settings)))
    return _apply_autoscaling_config(_resolve_policy_callable(config.policy)), config


def context(config: Any, work: list[ReplicaWork], target: int, state: dict[str, Any], **fields: Any) -> Any:
    metrics = {name: {f"r{i}": getattr(one, name) for i, one in enumerate(work)} for name in STATS}
    values: dict[str, Any] = {
        "aggregated_metrics": metrics,
        "current_num_replicas": len(work),
        "target_num_replicas": target,
        "total_num_requests": 0.0,
        "capacity_adjusted_min_replicas": config.min_replicas,
        "capacity_adjusted_max_replicas": config.max_replicas,
        "policy_state": state,
        "config": config,
    }
    return SimpleNamespace(**{**values, **fields})


@given(st.lists(works, min_size=1, max_size=8), st.integers(1, 8))
def test_serve_never_gets_less_than_min_or_more_than_max(fleet: list[ReplicaWork], target: int) -> None:
    policy, config = serve_policy(min=2, upscale_delay_s=0, downscale_delay_s=0)
    desired, _ = policy(context(config, fleet, max(target, 2), {}))
    assert 2 <= desired <= 8


def test_serves_delays_stay_in_force_around_the_policy() -> None:
    policy, config = serve_policy(ttft_target_s=0.5, catch_up_s=0, upscale_delay_s=60, downscale_delay_s=0)
    waiting = [ReplicaWork(queued_prefill_s=2.0)]
    desired, state = policy(context(config, waiting, 1, {}))
    assert desired == 1  # wanted for 0 s yet
    state = {key: value - 61 if "timestamp" in key and value else value for key, value in state.items()}
    assert policy(context(config, waiting, 1, state))[0] == 4
    assert policy(context(config, [ReplicaWork()] * 4, 4, {}))[0] == 1


def test_from_zero_a_waiting_request_brings_the_first_replica_and_any_request_keeps_it() -> None:
    policy, config = serve_policy(min=0, upscale_delay_s=60, downscale_delay_s=0)
    assert policy(context(config, [], 0, {}))[0] == 0
    assert policy(context(config, [], 0, {}, total_num_requests=1.0))[0] == 1
    assert policy(context(config, [ReplicaWork()], 1, {}, total_num_requests=1.0))[0] == 1
    assert policy(context(config, [ReplicaWork()], 1, {}))[0] == 0


def test_an_unloaded_model_stays_so_while_no_call_waits_for_it() -> None:
    policy, config = serve_policy(min=2, upscale_delay_s=0, downscale_delay_s=0)
    assert config.min_replicas == 0
    assert policy(context(config, [], 0, {}))[0] == 0
    assert policy(context(config, [ReplicaWork(queued_prefill_s=9.0)], 0, {}))[0] == 0
    assert policy(context(config, [], 2, {}))[0] == 2  # loaded again


def test_stats_that_are_missing_or_no_numbers_are_not_work() -> None:
    metrics = {name: {"new": 0.5, "old": 0.5} for name in STATS}
    metrics["busy_share"], metrics["kv_share"] = {"old": math.nan}, {"old": -0.5}
    metrics["unserved_share"] = {"old": -0.5}
    assert reported_work(metrics) == [
        replace(ReplicaWork(*[0.5] * len(STATS)), busy_share=0.0, kv_share=0.0, unserved_share=-0.5)
    ]
    assert reported_work({}) == []
