"""Whole runs: the real policy over simulated replicas that boot, in a burst and after it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from deployments.config.autoscaling import AutoscalingSettings
from deployments.config.settings import AdmissionSettings
from deployments.simulator.fleet.arrivals import Arrivals, Burst, arrivals
from deployments.simulator.fleet.scenario import Scenario
from deployments.simulator.fleet.trace import Trace, TraceRequest
from deployments.simulator.scaling.result import ScalingResult
from deployments.simulator.scaling.run import ScalingScenario, simulate_scaling
from router.policy_names import policy_named
from tests.router.support.traffic import BLOCK, conversations, steady

NUM = 4
PROMPT = 24_576
LOAD = 0.7
"""Share of what four replicas prefill that comes before the burst."""
RATE = NUM * Scenario().service.prefill_rate
BURST = Burst(10.0, 120.0, 100.0)
NEEDED = math.ceil(10 * LOAD * NUM / 0.85)


def evenly(seconds: float) -> Arrivals:
    """Traffic that shares no prefix, so that what comes is what has to be computed."""
    return arrivals(steady(seconds, LOAD * RATE / PROMPT, PROMPT), LOAD, RATE, 0)


TRAFFIC = evenly(120 + 1000 + 300).with_burst(BURST)


def scenario(boot_s: float = 40.0, **autoscaling: Any) -> ScalingScenario:
    settings = AutoscalingSettings.model_validate({"min": NUM, "max": 100, "downscale_delay_s": 60, **autoscaling})
    return ScalingScenario(Scenario(num_ingresses=3), settings, boot_s)


def run(of: ScalingScenario, traffic: Arrivals = TRAFFIC) -> ScalingResult:
    return simulate_scaling("", traffic, BLOCK, of, lambda: policy_named("cost"))


@pytest.fixture(scope="module")
def scaled() -> ScalingResult:
    return run(scenario())


@pytest.fixture(scope="module")
def fixed() -> ScalingResult:
    return run(scenario(max=NUM))


def test_a_tenfold_burst_on_four_replicas_is_answered_with_one_decision(scaled: ScalingResult) -> None:
    (_, before), (at, asked), *later = scaled.targets
    assert before == NUM
    delay, look_back = 10.0, 6.0
    assert BURST.start + delay <= at <= BURST.start + delay + look_back
    assert NEEDED <= asked <= 1.3 * NEEDED
    assert all(target < asked for _, target in later)


def test_without_the_ingresses_reports_the_fleet_grows_slowly_and_most_of_the_burst_is_lost(
    scaled: ScalingResult,
) -> None:
    blind = run(replace(scenario(), hears_ingresses=False))
    targets = [target for _, target in blind.targets]
    assert all(after <= before / 0.85 + 2 for before, after in pairwise(targets))
    assert blind.attainment < scaled.attainment - 0.15
    assert blind.turned_away > scaled.turned_away + 0.1


def test_the_number_of_replicas_is_bounded_by_the_maximum(scaled: ScalingResult) -> None:
    bounded = run(scenario(max=12))
    assert [target for _, target in bounded.targets[:2]] == [NUM, 12]
    assert bounded.attainment < scaled.attainment


def test_replicas_serve_when_they_have_booted_and_are_paid_from_the_start(
    fixed: ScalingResult, scaled: ScalingResult
) -> None:
    never = run(scenario(boot_s=10_000.0))
    assert never.attainment == fixed.attainment
    assert never.replica_hours > 2 * fixed.replica_hours
    assert run(scenario(boot_s=5.0)).attainment > scaled.attainment > never.attainment


def test_a_fixed_number_costs_its_time(fixed: ScalingResult) -> None:
    assert fixed.replica_hours == pytest.approx(NUM * TRAFFIC.times[-1] / 3600)
    assert fixed.targets == [(0.0, NUM)]


def test_after_the_burst_the_fleet_is_as_small_as_before_and_no_request_is_dropped() -> None:
    patient = AdmissionSettings(
        max_wait_s=10_000.0,
        max_waiting=10**6,
        max_waiting_tokens=10**9,
        max_waiting_per_tenant=10**6,
        max_waiting_tokens_per_tenant=10**9,
    )
    result = run(replace(scenario(), admission=patient))
    assert result.turned_away == 0
    assert result.targets[-1][1] <= NUM + 2


def test_under_constant_load_nothing_changes() -> None:
    assert run(scenario(), evenly(300)).targets == [(0.0, NUM)]


def test_a_run_depends_only_on_its_arguments() -> None:
    short = evenly(300).with_burst(Burst(10.0, 20.0, 20.0))
    first = run(scenario(boot_s=5.0), short)
    assert len(first.targets) > 2
    assert run(scenario(boot_s=5.0), short) == first


def test_conversations_with_answers_that_fill_the_memory_end_too() -> None:
    trace = conversations(400)
    offered = arrivals(trace, 2.0, RATE, 0)
    small = replace(scenario(), fleet=Scenario(num_ingresses=2, cache_tokens=120_000))
    result = run(small, offered)
    assert result.num_requests == 400
    assert 0 < result.attainment <= 1 - result.turned_away


def test_a_request_that_can_never_fit_is_counted_as_not_served() -> None:
    requests = (TraceRequest(0.0, 600, 1, (1, 2)), TraceRequest(1.0, 60_000, 1, tuple(range(10, 128))))
    offered = arrivals(Trace("t", requests, BLOCK, True), 0.1, RATE, 0)
    result = run(replace(scenario(), fleet=Scenario(cache_tokens=20_000)), offered)
    assert (result.attainment, result.turned_away) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("wrong", "says"), [({"boot_s": -1.0}, "at least 0 s to boot"), ({"ttft_slo_s": 0.0}, "above 0")]
)
def test_impossible_scenarios_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(scenario(), **wrong)
