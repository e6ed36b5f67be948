"""Simulated replicas whose machines end after a notice."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest

from deployments.simulator.fleet.arrivals import arrivals
from deployments.simulator.fleet.departures import Figures
from deployments.simulator.fleet.fleet import SimulatedFleet
from deployments.simulator.fleet.replica import Job
from deployments.simulator.fleet.rivals import SIMULATED
from deployments.simulator.fleet.scenario import AnnouncedEnd, HandOver, Scenario
from deployments.simulator.fleet.service import ServiceModel
from deployments.simulator.fleet.tiers import Tiers
from router.cost import REUSE_S
from router.policy_names import policy_named
from tests.router.support.traffic import conversations

CHAT = conversations(700)
FLEET = Scenario(
    num_replicas=8, cache_tokens=230_000, load=0.8, keep_tokens=4_000_000, tiers=Tiers(peer_bandwidth=1.25e9),
    service=ServiceModel(decode_base_s=0.05),
)  # fmt: skip
FAST = replace(FLEET, tiers=Tiers(peer_bandwidth=50e9))


@cache  # several tests compare the same runs
def run(hand_over: HandOver, grace_s: float, fleet: Scenario = FLEET) -> tuple[list[Job], Figures, float]:
    """Return the requests, the figures, and the prompt tokens computed."""
    notices = tuple(AnnouncedEnd(number, 20.0 + 12.0 * number, grace_s) for number in range(8))
    scenario = replace(fleet, notices=notices, hand_over=hand_over)
    offered = arrivals(CHAT, scenario.load, 8 * scenario.service.prefill_rate, scenario.seed)
    policy = partial(policy_named, "cost_fetch", SIMULATED)
    simulated = SimulatedFleet(CHAT.block_tokens, scenario, policy, REUSE_S / offered.compression)
    jobs = simulated.run(offered)
    return jobs, simulated.figures, sum(simulated.prefill_seconds) * scenario.service.prefill_rate


@pytest.mark.parametrize("hand_over", ["nothing", "arbitrary", "worth"])
@pytest.mark.parametrize("grace_s", [0.0, 5.0, 30.0])
def test_every_request_is_served_whatever_is_handed_over(hand_over: HandOver, grace_s: float) -> None:
    jobs, figures, _ = run(hand_over, grace_s)
    assert all(job.first_token_at is not None and job.lease is None for job in jobs)
    assert figures.used_tokens <= figures.prefix_tokens
    assert (figures.num_streams == figures.prefix_tokens == 0) == (hand_over == "nothing" or grace_s == 0.0)


def test_streams_are_lost_without_a_hand_over_and_fewer_the_more_time_there_is() -> None:
    lost = [run("nothing", grace_s)[1].num_lost for grace_s in (0.0, 5.0, 30.0)]
    assert lost[0] > lost[1] > lost[2]
    assert run("worth", 5.0, FAST)[1].lost_tokens < run("nothing", 5.0, FAST)[1].lost_tokens / 2


def test_prefixes_that_were_handed_over_are_used_later() -> None:
    assert run("worth", 30.0)[1].used_tokens > 0.1 * run("worth", 30.0)[1].prefix_tokens > 0


def test_a_run_is_repeated_exactly() -> None:
    before = run("arbitrary", 5.0)[1:]
    run.cache_clear()
    assert run("arbitrary", 5.0)[1:] == before


def test_a_hand_over_needs_links_and_a_notice_a_replica() -> None:
    with pytest.raises(ValueError, match="peer_bandwidth"):
        run("worth", 5.0, replace(FLEET, tiers=Tiers()))
    with pytest.raises(ValueError, match="no replica 8 to kill"):
        replace(FLEET, notices=(AnnouncedEnd(8, 1.0, 1.0),))
