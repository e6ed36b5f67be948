"""Other routers' rules, each where it differs from the rest."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deployments.simulator.fleet.affinity import AffinityPolicy
from deployments.simulator.fleet.fleet import simulate
from deployments.simulator.fleet.kv_aware import KVAwarePolicy
from deployments.simulator.fleet.rivals import (
    RIVALS,
    SIMULATED,
    LinearPolicy,
    PowerOfTwoPolicy,
    ProductPolicy,
    RoundRobinPolicy,
    StickyPolicy,
    ThresholdPolicy,
)
from deployments.simulator.fleet.scenario import Scenario
from deployments.simulator.fleet.trace import Trace, TraceRequest
from router.cost import Candidate, RouteQuery
from router.policy_names import policy_named
from tests.router.support.fleets import candidate, fleets, queries, query

RNG = random.Random(0)


@pytest.mark.parametrize("name", sorted(RIVALS))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40)
@given(prompt=queries(), fleet=fleets(), seed=st.integers(0, 9))
def test_every_replica_is_listed_once_the_unavailable_last(
    name: str, prompt: RouteQuery, fleet: list[Candidate], seed: int
) -> None:
    decision = policy_named(name, SIMULATED).decide(prompt, fleet, random.Random(seed))
    assert Counter(decision.order) == Counter(each.replica for each in fleet)
    available = {each.replica: each.is_available for each in fleet}
    in_order = [available[replica] for replica in decision.order]
    assert in_order == sorted(in_order, reverse=True)
    assert decision.policy == name


def first(policy: object, prompt: RouteQuery, fleet: list[Candidate]) -> str:
    return policy.decide(prompt, fleet, RNG).order[0]  # type: ignore[attr-defined,no-any-return]


def test_round_robin_takes_turns() -> None:
    policy, fleet = RoundRobinPolicy(), [candidate(name) for name in "abc"]
    assert [first(policy, query(), fleet) for _ in range(4)] == ["a", "b", "c", "a"]


def test_power_of_two_chooses_the_less_busy_of_two() -> None:
    fleet = [candidate("a", num_running=5), candidate("b", num_running=1)]
    assert {first(PowerOfTwoPolicy(), query(), fleet) for _ in range(10)} == {"b"}


def test_threshold_follows_a_long_match_and_ignores_a_short_one() -> None:
    fleet = [candidate("a", num_running=10), candidate("b", num_running=1)]
    assert first(ThresholdPolicy(), query(1000, {"a": 301}), fleet) == "a"
    assert first(ThresholdPolicy(), query(1000, {"a": 300}), fleet) == "b"


def test_threshold_ignores_the_cache_when_loads_are_out_of_balance() -> None:
    fleet = [candidate("a", num_running=64), candidate("b", num_running=0)]
    assert first(ThresholdPolicy(), query(1000, {"a": 900}), fleet) == "a"
    fleet[0] = replace(fleet[0], num_running=65)
    assert first(ThresholdPolicy(), query(1000, {"a": 900}), fleet) == "b"


def test_linear_adds_prefill_and_the_memory_in_use() -> None:
    fleet = [candidate("a", pages_free=900), candidate("b", pages_free=1000)]  # 100 pages of 16 tokens
    assert first(LinearPolicy(), query(2000, {"a": 1601}), fleet) == "a"
    assert first(LinearPolicy(), query(2000, {"a": 1599}), fleet) == "b"


def test_product_multiplies_new_tokens_with_the_batch() -> None:
    """100 tokens beside 9 requests against 1000 beside none: 1000 to 1000, and one request more decides."""
    fleet = [candidate("a", num_running=8), candidate("b", num_running=0)]
    assert first(ProductPolicy(), query(1000, {"a": 900}), fleet) == "a"
    fleet[0] = replace(fleet[0], num_running=10)
    assert first(ProductPolicy(), query(1000, {"a": 900}), fleet) == "b"
    queued = [candidate("a", queued_prefill_tokens=5000), candidate("b")]
    assert first(ProductPolicy(), query(1000, {"a": 900}), queued) == "a"
    assert first(ProductPolicy(with_queue=True), query(1000, {"a": 900}), queued) == "b"


def chained(*blocks: int) -> RouteQuery:
    return query(512 * len(blocks), chain=tuple(blocks))


def test_affinity_chooses_the_replica_of_the_longest_prefix_or_else_the_smallest_tree() -> None:
    policy, fleet = AffinityPolicy(), [candidate(name) for name in "abc"]
    long = first(policy, chained(*range(1, 9)), fleet)
    assert first(policy, chained(*range(1, 7), 50), fleet) == long
    other = first(policy, chained(90, 91), fleet)
    assert other != long
    assert first(policy, chained(*range(70, 90)), fleet) not in (long, other)


def test_affinity_ignores_loads_by_default_and_minds_them_with_a_threshold() -> None:
    for threshold, expected in ((float("inf"), "a"), (10.0, "b")):
        policy = AffinityPolicy(imbalanced_threshold=threshold)
        assert first(policy, chained(1, 2, 3), [candidate("a"), candidate("b", is_available=False)]) == "a"
        fleet = [candidate("a", num_running=100), candidate("b")]
        assert first(policy, chained(1, 2, 3), fleet) == expected


def test_affinity_forgets_a_replica_that_dies() -> None:
    policy, fleet = AffinityPolicy(), [candidate("a"), candidate("b")]
    home = first(policy, chained(1, 2, 3), fleet)
    gone = [replace(each, is_available=each.replica != home) for each in fleet]
    assert first(policy, chained(1, 2, 3), gone) != home
    assert first(policy, chained(1, 2, 3), fleet) != home


def held(tokens: int, **changes: object) -> list[Candidate]:
    """Two replicas of which the first has to wait for `tokens` of prefill, at 10,000 tokens a second."""
    return [candidate("a", queued_prefill_tokens=float(tokens), **changes), candidate("b", **changes)]


def test_sticky_stays_with_holders_of_four_fifths_until_they_are_saturated() -> None:
    """18 s of waiting are 180,000 tokens; short of four fifths, tokens alone decide."""
    assert first(StickyPolicy(), query(1000, {"a": 800}), held(180_000)) == "a"
    assert first(StickyPolicy(), query(1000, {"a": 800}), held(180_001)) == "b"
    assert first(StickyPolicy(), query(1000, {"a": 799}), held(798)) == "a"
    assert first(StickyPolicy(), query(1000, {"a": 799}), held(800)) == "b"


def test_sticky_chooses_among_holders_by_tokens_and_waits_where_all_wait() -> None:
    fleet = [*held(60_000), candidate("c", queued_prefill_tokens=59_000.0)]
    assert first(StickyPolicy(), query(1000, {"a": 1000, "c": 800}), fleet) == "c"
    busy = [replace(each, queued_prefill_tokens=each.queued_prefill_tokens + 200_000.0) for each in held(1000)]
    assert first(StickyPolicy(), query(1000, {"a": 1000}), busy) == "a"
    slow = [replace(each, prefill_rate=1000.0) for each in held(18_001)]
    assert first(StickyPolicy(), query(1000, {"a": 1000}), slow) == "b"


def test_kv_aware_adds_prefill_and_the_blocks_of_requests_and_counts_shared_ones_once() -> None:
    """Blocks of 500 tokens. 1 to 4 run on a; there, a prompt that shares two of them takes fewer new blocks."""
    fleet = [candidate("a", page_size=500), candidate("b", page_size=500, is_available=False)]
    for others, overlap, expected in (
        ((1, 2, 8), {}, "b"),  # 5 blocks on a, 3 on b
        ((1, 2, 8), {"a": 999}, "b"),
        ((1, 2, 8), {"a": 1001}, "a"),
        ((8, 9, 10), {"a": 1999}, "b"),  # 7 blocks on a
    ):
        policy = KVAwarePolicy()
        assert first(policy, query(2000, chain=(1, 2, 3, 4)), fleet) == "a"
        both = [replace(each, is_available=True) for each in fleet]
        assert first(policy, query(2000, overlap, chain=others), both) == expected


def test_kv_aware_counts_a_request_from_its_placement_to_its_end() -> None:
    policy, fleet = KVAwarePolicy(), [candidate("a"), candidate("b")]
    busy = first(policy, query(64, chain=(1, 2, 3, 4)), fleet)
    idle = "b" if busy == "a" else "a"
    assert first(policy, query(64, chain=(5, 6, 7)), fleet) == idle
    assert first(policy, query(64, chain=(8, 9)), fleet) == idle  # 4 blocks there, 3 here
    policy.finished((1, 2, 3, 4), busy)
    assert first(policy, query(64, chain=(8, 9)), fleet) == busy
    policy.finished((1, 2, 3, 4), busy)  # which runs there no more
    assert first(policy, query(64, chain=(10,)), fleet) == busy


def test_kv_aware_forgets_the_requests_of_a_replica_that_dies() -> None:
    policy, fleet = KVAwarePolicy(), [candidate("a"), candidate("b", is_available=False)]
    assert first(policy, query(64, chain=(1, 2, 3, 4)), fleet) == "a"
    swapped = [replace(each, is_available=not each.is_available) for each in fleet]
    assert first(policy, query(16, chain=(1,)), swapped) == "b"
    both = [replace(each, is_available=True) for each in fleet]
    assert first(policy, query(16, chain=(9,)), both) == "a"


def test_kv_aware_hears_in_a_simulation_which_requests_have_ended() -> None:
    """A minute after a prompt of 200 blocks, one that shares 50 of its 60 goes where they are cached.

    Did the first still count, its blocks would outweigh them.
    """
    requests = tuple(
        TraceRequest(60.0 * number, 512 * len(blocks), 5, blocks)
        for number, blocks in enumerate(((*range(200),), (*range(50), *range(1000, 1010))))
    )
    result = simulate(
        Trace("two", requests, 512, True), Scenario(num_replicas=2, load=0.1), "kv_aware", KVAwarePolicy
    )
    assert result.hit_rate == pytest.approx(50 / 260)
