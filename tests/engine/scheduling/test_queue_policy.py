"""Queue policies: fixed positions order requests as their claims do at any time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache import Namespace
from engine.scheduling.queue_policy import POLICIES, PriorityWithAgeing, policy_named
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams

HALF_LIFE = 8.0


def request(arrival: float = 0.0, priority: int = 0, tenant: str = "") -> Request:
    params = SamplingParams()
    return Request.make(
        "r", [1], params, arrival=arrival, seed=1, namespace=Namespace("m"), priority=priority, tenant=tenant
    )


requests = st.builds(request, st.integers(0, 200).map(float), st.integers(-5, 5))


@given(requests, requests, st.integers(0, 500))
def test_positions_order_as_claims_do_at_any_time(one: Request, other: Request, since: int) -> None:
    """Claims are computed by definition, in exact powers of two, at a moment at which both have come."""
    now = max(one.arrival, other.arrival) + since
    claim, rival = ((now - r.arrival) / HALF_LIFE - r.priority for r in (one, other))  # log2
    queue_policy = PriorityWithAgeing(HALF_LIFE)
    if claim != rival:
        assert (claim > rival) == (queue_policy.position(one) < queue_policy.position(other))
    elif one.arrival != other.arrival:
        assert (one.arrival < other.arrival) == (queue_policy.position(one) < queue_policy.position(other))


def test_the_advantage_of_a_newcomer_halves_every_half_life() -> None:
    waits = request(0.0, priority=0)

    def advantage(now: float) -> float:
        """Return the ratio of a newcomer's claim, of priority -3, to that of the waiting request."""
        newcomer = PriorityWithAgeing(HALF_LIFE).position(request(now, priority=-3))
        return 2 ** (
            (PriorityWithAgeing(HALF_LIFE).position(waits).effective_arrival - newcomer.effective_arrival)
            / HALF_LIFE
        )

    assert [advantage(n * HALF_LIFE) for n in range(4)] == [8, 4, 2, 1]


def test_equal_priorities_are_first_come_first_served_under_any_policy() -> None:
    for policy in POLICIES:
        position = policy_named(policy, HALF_LIFE).position
        assert position(request(1.0, 7)) < position(request(1.0000001, 7))


def test_which_requests_may_preempt_which() -> None:
    def may(policy: str, waiting: Request, running: Request) -> bool:
        queue_policy = policy_named(policy, HALF_LIFE)
        return queue_policy.position(waiting).can_preempt(queue_policy.position(running))

    low, high = request(0.0, 0, "a"), request(5.0, -1, "a")
    assert may("priority", high, low)
    assert not may("priority", low, high)
    assert not may("priority", request(0.0, -1), request(5.0, -1)), "nothing from equals, even if they came later"
    assert not may("priority", request(8.5, -1), low), "its claim has outgrown the other's"
    assert not may("fcfs", high, low)
    assert may("fair", high, low)
    assert not may("fair", request(5.0, -1, "b"), low), "nothing from another tenant"


def test_first_come_first_served_is_deaf_to_priorities() -> None:
    position = policy_named("fcfs").position
    assert position(request(1.0, 9)) < position(request(2.0, -9))


def test_long_half_lives_and_large_clocks_still_distinguish_arrivals() -> None:
    position = policy_named("priority", 1e6).position
    early, late = request(1e6, 100), request(1e6 + 1e-6, 100)
    assert position(early) < position(late)
    assert math.isfinite(position(early).effective_arrival)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown policy 'lifo'; known are fair, fcfs, priority"):
        policy_named("lifo")
