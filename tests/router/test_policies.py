"""Policies: properties that all of them have, and what each does that the others do not."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router.cost import Candidate, RouteQuery, queue_seconds
from router.policies import (
    POLICIES,
    CostPolicy,
    Decision,
    LeastLoadedPolicy,
    LoadGuard,
    PlacePolicy,
)
from router.policy_names import policy_named
from router.rendezvous import HashedNames, RendezvousOrder
from tests.router.support.fleets import NAMES, candidate, fleets, queries, query

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
every_policy = pytest.mark.parametrize("name", sorted(POLICIES))


@every_policy
@unhurried
@given(prompt=queries(), fleet=fleets(), seed=st.integers(0, 9))
def test_every_replica_is_listed_once_the_unavailable_last(
    name: str, prompt: RouteQuery, fleet: list[Candidate], seed: int
) -> None:
    decision = policy_named(name).decide(prompt, fleet, random.Random(seed))
    assert Counter(decision.order) == Counter(replica.replica for replica in fleet)
    available = {replica.replica: replica.is_available for replica in fleet}
    in_order = [available[replica] for replica in decision.order]
    assert in_order == sorted(in_order, reverse=True)
    assert decision.regret_tokens >= 0
    assert decision.policy == name


@every_policy
@unhurried
@given(prompt=queries(), fleet=fleets(), seed=st.integers(0, 9))
def test_the_same_moment_and_chance_give_the_same_decision(
    name: str, prompt: RouteQuery, fleet: list[Candidate], seed: int
) -> None:
    one = policy_named(name).decide(prompt, fleet, random.Random(seed))
    assert policy_named(name).decide(prompt, fleet, random.Random(seed)) == one


@every_policy
def test_when_none_is_available_all_are_tried(name: str) -> None:
    fleet = [candidate(replica, is_available=False) for replica in "abc"]
    decision = policy_named(name).decide(query(), fleet, random.Random(0))
    assert sorted(decision.order) == ["a", "b", "c"]
    assert decision.reason == "none_available"


@every_policy
def test_a_decision_survives_serialisation(name: str) -> None:
    decision = policy_named(name).decide(
        query(1000, {"a": 512}), [candidate("a"), candidate("b")], random.Random(0)
    )
    decoded = msgspec.json.decode(msgspec.json.encode(decision, enc_hook=list), type=Decision)
    assert list(decoded.order) == list(decision.order)
    assert dataclasses.replace(decoded, order=()) == dataclasses.replace(decision, order=())


def test_an_unknown_policy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown routing policy 'best'; there are cost, session"):
        policy_named("best")


def decide(prompt: RouteQuery, fleet: list[Candidate], seed: int = 0) -> Decision:
    return CostPolicy().decide(prompt, fleet, random.Random(seed))


@unhurried
@given(queries(), fleets(), st.integers(0, 9))
def test_cost_chooses_the_cheapest_it_compared_within_the_tolerance(
    prompt: RouteQuery, fleet: list[Candidate], seed: int
) -> None:
    decision = decide(prompt, fleet, seed)
    if not fleet:
        return
    totals = {replica: terms.total for replica, terms in decision.terms.items()}
    assert totals[decision.order[0]] <= min(totals.values()) * 1.05 + 0.02
    assert list(decision.order[1 : len(totals)]) == sorted(decision.order[1 : len(totals)], key=totals.__getitem__)


def test_cost_prefers_the_holder_until_its_queue_costs_more_than_the_prefix() -> None:
    """8,000 tokens at 10,000/s and w = 2 are worth 1.6 s of queue."""
    fleet = [candidate(name) for name in NAMES]
    prompt = query(10_000, {"r3": 8000})
    assert decide(prompt, fleet).order[0] == "r3"
    assert decide(prompt, fleet).reason == "holder"
    fleet[3] = replace(fleet[3], queued_prefill_tokens=15_000)
    assert decide(prompt, fleet).order[0] == "r3"
    fleet[3] = replace(fleet[3], queued_prefill_tokens=19_000)
    elsewhere = decide(prompt, fleet)
    assert (elsewhere.reason, elsewhere.regret_tokens) == ("cheaper", 8000)


def test_cost_finds_the_holder_among_many() -> None:
    fleet = [candidate(f"r{number}") for number in range(300)]
    assert all(decide(query(5000, {"r250": 4096}), fleet, seed).order[0] == "r250" for seed in range(20))


def test_a_cold_prefix_has_the_same_place_from_everywhere() -> None:
    """Different chance, small differences of load, another order of replicas: one place for each prefix."""
    for key in range(20):
        chosen = set()
        for seed in range(10):
            rng = random.Random(seed)
            fleet = [candidate(name, queued_prefill_tokens=rng.random() * 100) for name in NAMES]
            rng.shuffle(fleet)
            chosen.add(decide(query(key=key), fleet, seed).order[0])
        assert len(chosen) == 1


def test_cold_prefixes_spread_over_the_fleet() -> None:
    chosen = Counter(decide(query(key=key), [candidate(name) for name in NAMES]).order[0] for key in range(1200))
    assert len(chosen) == len(NAMES)
    assert max(chosen.values()) < 2 * min(chosen.values())


def test_a_session_has_a_place_while_nothing_of_its_prompt_is_held() -> None:
    fleet = [candidate(name) for name in NAMES]
    chosen = {decide(query(key=key, session="s"), fleet).order[0] for key in range(20)}
    assert len(chosen) == 1
    away = next(name for name in NAMES if name not in chosen)
    assert decide(query(10_000, {away: 8000}, session="s"), fleet).order[0] == away


def test_two_ingresses_with_the_same_stale_view_do_not_herd() -> None:
    """One replica looks idle, all others have 0.5 s: of 100 blind decisions most must go elsewhere."""
    fleet = [candidate(f"r{number}", queued_prefill_tokens=5000) for number in range(64)]
    fleet[5] = replace(fleet[5], queued_prefill_tokens=0)
    chosen = Counter(decide(query(key=seed), fleet, seed).order[0] for seed in range(100))
    assert chosen["r5"] < 25


def test_a_place_is_kept_until_it_is_too_busy_and_then_left_for_the_next() -> None:
    fleet = [candidate(name, num_running=10) for name in NAMES]
    preferred = list(RendezvousOrder(7, HashedNames(NAMES)))
    policy = PlacePolicy("rendezvous", LoadGuard(factor=1.5, slack=4.0))
    assert policy.decide(query(), fleet, random.Random(0)).order == tuple(preferred)
    place = NAMES.index(preferred[0])
    fleet[place] = replace(fleet[place], num_running=40)
    moved = policy.decide(query(), fleet, random.Random(0))
    assert (moved.order[0], moved.reason) == (preferred[1], "spill")


def test_sticky_sessions_ignore_the_prefix() -> None:
    fleet = [candidate(name) for name in NAMES]
    policy = PlacePolicy("session")
    chosen = {policy.decide(query(key=key, session="s"), fleet, random.Random(0)).order[0] for key in range(9)}
    assert len(chosen) == 1
    without = {policy.decide(query(key=key), fleet, random.Random(0)).order[0] for key in range(30)}
    assert len(without) > 3


def test_a_replica_that_goes_moves_only_its_own_prefixes() -> None:
    for key in range(50):
        first, *others = RendezvousOrder(key, HashedNames(NAMES))
        left = HashedNames(name for name in NAMES if name != first)
        assert list(RendezvousOrder(key, left)) == others


def test_guards_are_checked() -> None:
    with pytest.raises(ValueError, match="factor"):
        LoadGuard(factor=0.5)
    with pytest.raises(ValueError, match="slack"):
        LoadGuard(slack=-1)
    with pytest.raises(ValueError, match="at least 1 random replica"):
        CostPolicy(num_random=0)


def test_a_beginning_that_all_prompts_share_does_not_bring_them_all_to_one_place() -> None:
    """A chat template's first block: it is held by one replica, and is no tenth of any prompt."""
    fleet = [candidate(name) for name in "abcd"]
    firsts = {
        CostPolicy().decide(query(500, {"a": 16}, key=key * 7919), fleet, random.Random(key)).order[0]
        for key in range(64)
    }
    assert firsts == set("abcd")


def test_a_replica_whose_batch_is_full_is_no_place_to_go_although_nothing_waits_for_prefill() -> None:
    full = candidate("a", num_running=31, max_running=8, finish_rate=2.0)
    assert queue_seconds(full) == pytest.approx(12.0)
    fleet = [full, candidate("b", num_running=7, max_running=8, finish_rate=2.0)]
    for policy in (CostPolicy(), LeastLoadedPolicy()):
        assert policy.decide(query(1000, {"a": 1000}), fleet, random.Random(1)).order[0] == "b"


def test_a_replica_that_runs_far_more_requests_is_spared_at_equal_costs() -> None:
    fleet = [candidate("a", num_running=60), *(candidate(name) for name in "bcd")]
    assert CostPolicy().decide(query(100, {"a": 96}), fleet, random.Random(1)).order[0] != "a"
