"""Prefill and decode apart: where a request's tokens come from, what moves, and that nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.simulator.fleet.fleet import SimulatedFleet, simulate
from deployments.simulator.fleet.replica import Job
from deployments.simulator.fleet.result import Result
from deployments.simulator.fleet.rivals import SIMULATED
from deployments.simulator.fleet.roles import Roles
from deployments.simulator.fleet.scenario import Kill, Scenario
from deployments.simulator.fleet.service import ServiceModel
from deployments.simulator.fleet.tiers import Tiers
from deployments.simulator.fleet.trace import TraceRequest
from router.policy_names import policy_named
from tests.router.support.traffic import conversations

SPEED = ServiceModel(prefill_rate=1000.0, decode_base_s=0.01, decode_per_request_s=0.0)
LINKS = Tiers(peer_bandwidth=10_000.0, peer_latency_s=0.0, kv_bytes_per_token=1.0)
PAIR = Scenario(
    num_replicas=2, cache_tokens=1000, cache_delay=0.0, load_delay=0.0, service=SPEED, tiers=LINKS,
    roles=Roles(1, 1, apart_above_tokens=150),
)  # fmt: skip
"""One replica for each side. Blocks of 100 tokens: one is computed in 100 ms, and sent in 10."""
FLEET = Scenario(
    num_replicas=4, cache_tokens=400_000, load=0.6, tiers=Tiers(peer_bandwidth=12.5e9), roles=Roles(2, 2)
)
CHAT = conversations(300)


class Fleet:
    """A fleet whose requests are submitted by hand."""

    def __init__(self, scenario: Scenario = PAIR) -> None:
        self.fleet = SimulatedFleet(100, scenario, lambda: policy_named("cost", SIMULATED), 300.0)
        self.jobs: list[Job] = []

    def submit(self, at: float, num_output: int, *blocks: int) -> int:
        self.fleet.run_until(at)
        job = self.fleet.new_job(TraceRequest(at, 100 * len(blocks), num_output, blocks), 0, at)
        self.jobs.append(job)
        self.fleet.submit(job, at)
        return len(self.jobs) - 1


def test_a_long_prompt_is_computed_apart_and_its_first_token_waits_for_no_transfer() -> None:
    one = Fleet()
    number = one.submit(0.0, 11, 1, 2, 3, 4)
    one.fleet.run_until(0.41)
    job = one.jobs[number]
    assert job.first_token_at == pytest.approx(0.4)
    assert one.fleet.prefill_seconds == [pytest.approx(0.4), 0.0]
    one.fleet.run_until(0.43)
    assert not one.fleet.replica(0).is_idle  # its KV is on its way
    one.fleet.run_until(0.45)
    assert one.fleet.replica(0).is_idle and not one.fleet.replica(1).is_idle
    one.fleet.run_until(0.4 + 0.04 + 10 * 0.01 + 0.001)
    assert one.fleet.replica(1).is_idle


def test_a_short_prompt_stays_where_it_decodes() -> None:
    one = Fleet()
    one.submit(0.0, 5, 1)
    one.fleet.run_until(10.0)
    assert one.fleet.prefill_seconds == [0.0, pytest.approx(0.1)]


def test_a_turn_of_which_little_is_new_stays_too() -> None:
    """The second turn finds all of the first where that was decoded."""
    one = Fleet()
    one.submit(0.0, 5, 1, 2, 3, 4)
    number = one.submit(5.0, 5, 1, 2, 3, 4, 5)
    one.fleet.run_until(10.0)
    assert one.jobs[number].hit_tokens == 400
    assert one.fleet.prefill_seconds == [pytest.approx(0.4), pytest.approx(0.1)]


def test_an_answer_waits_for_room_where_it_is_decoded() -> None:
    """10 pages: two requests of 4 blocks and 200 tokens of answer do not decode at once."""
    one = Fleet()
    for first in (1, 5):
        one.submit(0.0, 200, *range(first, first + 4))
    one.fleet.run_until(0.44 + 199 * 0.01 - 0.01)
    assert not one.fleet.replica(0).is_idle
    one.fleet.run_until(100.0)
    assert all(one.fleet.replica(index).is_idle for index in (0, 1))


def run(scenario: Scenario = FLEET) -> Result:
    return simulate(CHAT, scenario, "cost_fetch", lambda: policy_named("cost_fetch", SIMULATED))


def test_a_fleet_with_roles_serves_everything() -> None:
    result = run()
    assert result.num_failed == run(replace(FLEET, roles=None)).num_failed == 0


@pytest.mark.parametrize("first", [0, 2])
def test_deaths_on_either_side_lose_no_request(first: int) -> None:
    slow = replace(FLEET, tiers=Tiers(peer_bandwidth=1e9))
    kills = tuple(Kill(first + number % 2, 4.0 + 3.0 * number) for number in range(16))
    result = run(replace(slow, kills=kills, restart_s=2.0))
    assert result.num_moved > 0
    assert result.num_failed == 0


def test_without_a_side_all_do_both() -> None:
    kills = (Kill(2, 5.0), Kill(3, 5.0))
    assert run(replace(FLEET, kills=kills, restart_s=1e6)).num_failed == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Roles(4, 0), "roles need at least 1 replica for each side, got prefill: 4, decode: 0"),
        (lambda: Roles(0, 4), "roles need at least 1 replica for each side"),
        (lambda: Roles(1, 1, -1), "apart_above_tokens must be at least 0, got -1"),
        (lambda: Roles.parse("2,2"), "roles are prefill=P,decode=D, such as prefill=10,decode=6; got '2,2'"),
        (lambda: replace(FLEET, roles=Roles(2, 1)), r"roles for 2 \+ 1 replicas, but the fleet has 4"),
        (lambda: replace(FLEET, tiers=Tiers()), "roles send KV from replica to replica: set peer_bandwidth"),
    ],
)
def test_roles_are_checked(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
