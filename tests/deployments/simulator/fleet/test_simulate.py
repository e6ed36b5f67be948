"""Whole runs: what a simulation must report whatever the traffic, and that the cost wins where it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from deployments.simulator.fleet.bounds import pooled_hit_rate, ttft_without_queue
from deployments.simulator.fleet.fleet import simulate
from deployments.simulator.fleet.result import Result, percentile
from deployments.simulator.fleet.rivals import SIMULATED
from deployments.simulator.fleet.scenario import Kill, Scenario
from deployments.simulator.fleet.service import ServiceModel
from deployments.simulator.fleet.trace import Trace, TraceRequest
from router.policies import Policy
from router.policy_names import policy_named
from tests.router.support.traffic import conversations

CACHE_TOKENS = 230_000
FLEET = Scenario(num_replicas=8, cache_tokens=CACHE_TOKENS, load=1.2)
CHAT = conversations(700)


@cache  # several tests compare with the same runs
def run(policy: str, scenario: Scenario = FLEET, trace: Trace = CHAT) -> Result:
    make: Callable[[], Policy] = lambda: policy_named(policy, SIMULATED)  # noqa: E731
    return simulate(trace, scenario, policy, make)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {name: run(name) for name in SIMULATED}


def test_every_policy_serves_everything(results: dict[str, Result]) -> None:
    for result in results.values():
        assert result.num_failed == result.num_moved == 0
        assert result.prefill_skew >= 1.0
        assert result.ttft_p50 <= result.ttft_p95 <= result.ttft_p99


def test_cost_has_shorter_waits_than_all_but_sticky(results: dict[str, Result]) -> None:
    """`sticky` waits less on this small fleet, and longer on recorded conversations (benchmarks/routing.py)."""
    waits = {name: result.ttft_p95 for name, result in results.items() if name not in ("cost", "cost_fetch")}
    assert results["cost"].ttft_p95 < 1.1 * waits.pop("sticky")
    assert results["cost"].ttft_p95 < min(waits.values())


def test_where_nothing_can_be_fetched_the_cost_that_counts_on_it_decides_alike(results: dict[str, Result]) -> None:
    assert replace(results["cost_fetch"], policy="cost") == results["cost"]


def test_cost_finds_nearly_as_much_as_one_pooled_cache(results: dict[str, Result]) -> None:
    pooled = pooled_hit_rate(CHAT, 8 * CACHE_TOKENS)
    assert results["cost"].hit_rate > 0.92 * pooled
    for blind in ("random", "round_robin", "pow2", "least_loaded"):
        assert results[blind].hit_rate < 0.5 * results["cost"].hit_rate


def test_nothing_finds_more_than_the_pooled_cache_by_much(results: dict[str, Result]) -> None:
    pooled = pooled_hit_rate(CHAT, 8 * CACHE_TOKENS)
    assert all(result.hit_rate < pooled * 1.01 for result in results.values())


def test_a_run_depends_only_on_its_seed(results: dict[str, Result]) -> None:
    assert run.__wrapped__("cost") == results["cost"]
    assert run("cost", replace(FLEET, seed=1)) != results["cost"]


def test_several_ingresses_with_old_news_do_nearly_as_well(results: dict[str, Result]) -> None:
    several = run("cost", replace(FLEET, num_ingresses=4))
    assert several.hit_rate > 0.9 * results["cost"].hit_rate
    assert several.ttft_p95 < 1.25 * results["cost"].ttft_p95


def test_news_that_never_come_cost_hits() -> None:
    """An ingress then knows its own dispatches of the last seconds only."""
    deaf = run("cost", replace(FLEET, num_ingresses=4, cache_delay=1e9))
    assert deaf.hit_rate < 0.9 * run("cost", replace(FLEET, num_ingresses=4)).hit_rate


def test_more_load_means_longer_waits() -> None:
    waits = [run("cost", replace(FLEET, load=load)).ttft_p95 for load in (0.5, 1.5, 3.0)]
    assert waits == sorted(waits)


def test_dead_replicas_cost_their_caches_and_no_request() -> None:
    """All but one die, one after the other: the hits of conversations that are under way are gone."""
    kills = tuple(Kill(number, 40.0 + 10.0 * number) for number in range(7))
    broken = run("cost", replace(FLEET, kills=kills, restart_s=5.0))
    assert broken.num_moved > 0
    assert broken.num_failed == 0
    assert broken.hit_rate < run("cost").hit_rate - 0.005


@pytest.mark.parametrize("policy", ["cost", "affinity", "rendezvous", "round_robin"])
def test_requests_wait_while_no_replica_is_left(policy: str) -> None:
    kills = tuple(Kill(number, 30.0) for number in range(8))
    result = run(policy, replace(FLEET, kills=kills, restart_s=5.0))
    assert result.num_failed == 0
    assert result.ttft_p99 > 3.0


def test_only_a_request_that_can_never_fit_fails() -> None:
    small = tuple(TraceRequest(float(number), 600, 1, (0, number + 1)) for number in range(20))
    large = TraceRequest(20.0, 60_000, 1, tuple(range(1000, 1118)))
    result = run("cost", replace(FLEET, cache_tokens=20_000), Trace("t", (*small, large), 512, True))
    assert result.num_failed == 1


def test_the_pooled_bound_of_a_trace_by_hand() -> None:
    """Blocks of 512: the second prompt finds one of two, the third all but its last token."""
    requests = (
        TraceRequest(0.0, 1024, 1, (1, 2)),
        TraceRequest(1.0, 1024, 1, (1, 3)),
        TraceRequest(2.0, 1000, 1, (1, 3)),
    )
    trace = Trace("t", requests, 512, True)
    assert pooled_hit_rate(trace, 100_000) == pytest.approx((512 + 999) / (1024 + 1024 + 1000))
    assert pooled_hit_rate(trace, 512) == 0.0
    speed = ServiceModel(prefill_rate=512.0)
    waits = [ttft_without_queue(trace, speed, share) for share in (0.3, 0.5, 1.0)]
    assert waits == [pytest.approx(1 / 512), 1.0, 2.0]


def test_kills_are_written_as_replica_at_seconds() -> None:
    assert Kill.parse("2@600") == Kill(2, 600.0)
    for wrong in ("2", "@5", "a@5", "2@-1"):
        with pytest.raises(ValueError, match="expected REPLICA@SECONDS, such as 2@600"):
            Kill.parse(wrong)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"num_replicas": 0}, "num_replicas must be at least 1"),
        ({"load": 0.0}, "load must be above 0"),
        ({"load_delay": -1.0}, "load_delay must be at least 0 s"),
        ({"kills": (Kill(8, 1.0),)}, "there is no replica 8 to kill: the fleet has 8"),
    ],
)
def test_scenarios_are_checked(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(FLEET, **setting)  # type: ignore[arg-type]


def test_percentiles_are_values_that_occurred() -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    assert [percentile(values, share) for share in (0.25, 0.5, 0.51, 1.0)] == [1.0, 2.0, 3.0, 4.0]
