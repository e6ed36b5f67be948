"""Blocks below the devices: counted for a prompt, bounded, and gone with their replicas; a load has its price."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cache.news.tier import Tier
from cache.node import Namespace
from cache.prefix_hash import block_hashes, prefix_root
from router.addresses import ReplicaAddress
from router.cost import cost, load_seconds
from router.fleet import Fleet
from router.lower_tiers import LowerTiers
from router.member import ReplicaLoad
from router.overlap import OutdatedOverlap, Overlap
from router.placer import Placer, PlacerSettings
from router.prefix_index import PrefixIndex
from tests.router.support.fleets import Prompt, candidate, query
from tests.support.count_calls import count_calls

BLOCK = 4
HOST, FILE = int(Tier.HOST), int(Tier.FILE)


@given(depths=st.lists(st.integers(0, 40), min_size=3, max_size=3).map(sorted), rest=st.integers(0, 9))
@settings(deadline=None, database=None)
def test_blocks_in_lower_tiers_are_counted_by_tier(depths: list[int], rest: int) -> None:
    """The device has the first blocks, the host those after them, files the others."""
    device, host, file = depths
    chain = list(range(1, file + rest + 1))
    lower = LowerTiers()
    lower.put("a", chain[device:file], [HOST] * (host - device) + [FILE] * (file - host), 10**6)
    find = lower.finder(chain, lambda: None)
    assert find("b", file) == () and lower.is_empty == (device == file)
    if device == file:
        assert find("a", file) == ()
        return
    wanted = [host - device, file - host]
    assert find("a", file) == tuple(wanted[: 2 if wanted[1] else 1])
    assert count_calls(lambda: find("a", file)) < 60


def test_an_index_knows_the_tier_of_each_block_until_it_changes() -> None:
    index, chain = PrefixIndex(BLOCK), list(range(1, 11))
    index.apply("a", chain, [])
    assert index.match(chain, 0.0).below("a") == () and not index.match(chain, 0.0).has_lower
    index.place_in_tiers("a", chain[6:], [HOST] * 4)
    overlap = index.match(chain, 0.0)
    assert (overlap.below("a"), overlap.times(BLOCK).below("a"), overlap.below("b")) == ((4,), (16,), ())
    assert index.match(chain[:6], 0.0).below("a") == ()
    index.place_in_tiers("a", chain[6:8], [0, 0])  # loaded
    with pytest.raises(OutdatedOverlap):
        overlap.below("a")
    assert index.match(chain, 0.0).below("a") == (2,)
    index.apply("a", [], chain[9:])
    assert index.match(chain, 0.0).below("a") == (1,)
    index.apply("a", chain[9:], [])  # computed anew
    index.apply("a", [chain[8]], [])
    assert index.match(chain, 0.0).below("a") == ()


def test_a_snapshot_and_a_departure_forget_the_tiers() -> None:
    index, chain = PrefixIndex(BLOCK), list(range(1, 11))
    for forget in (lambda: index.replace("a", chain), lambda: index.forget("a")):
        index.apply("a", chain, [])
        index.place_in_tiers("a", chain, [HOST] * 10)
        assert index.match(chain, 0.0).below("a") == (10,)
        forget()
        assert not index.match(chain, 0.0).has_lower


def test_the_blocks_below_are_bounded_and_those_beyond_count_as_on_the_device() -> None:
    lower, draw, most = LowerTiers(), random.Random(1), 0
    for _ in range(2000):
        replica, blocks = draw.choice("abc"), draw.sample(range(40), 5)
        if draw.random() < 0.6:
            lower.put(replica, blocks, [draw.randrange(3) for _ in blocks], 60)
        elif draw.random() < 0.9:
            lower.forget(replica, blocks)
        else:
            lower.drop(replica)
        found = [lower.finder([block], lambda: None) for block in range(40)]
        num_known = sum(bool(below(name, 1)) for below in found for name in "abc")
        assert lower.num_blocks == num_known <= 60
        most = max(most, num_known)
    assert most == 60


def below_of(blocks: int) -> Overlap:
    """Replica a holds 100 blocks, of which so many lie on the host."""
    index, chain = PrefixIndex(BLOCK), list(range(1, 101))
    index.apply("a", chain, [])
    index.place_in_tiers("a", chain[100 - blocks :], [HOST] * blocks)
    return index.match(chain, 0.0).times(BLOCK)


def test_a_load_costs_more_than_nothing_and_no_more_than_computing() -> None:
    prompt, fast, slow = query(400), candidate(load_rates=(100_000.0,)), candidate(load_rates=(10.0,))
    on_device, on_host = below_of(0), below_of(50)
    terms = [cost(structs.replace(prompt, overlap=held), fast) for held in (on_device, on_host)]
    assert (terms[0].load, terms[0].below) == (0.0, ())
    assert (terms[1].load, terms[1].below, terms[1].overlap) == (200 / 100_000, (200,), 400)
    assert terms[1].total == pytest.approx(terms[0].total + terms[1].load)
    cold = cost(structs.replace(prompt, overlap={}), fast)
    assert terms[0].total < terms[1].total < cold.total
    assert load_seconds((200,), slow) == load_seconds((200,), candidate()) == 200 / 10_000


@pytest.mark.parametrize("others", ["bcdefghi", "cdefghib"])
def test_the_device_is_preferred_to_the_host_and_the_host_to_nothing(others: str) -> None:
    """Whatever rendezvous hashing says: for many prompts, among replicas that are equal otherwise."""
    fleet = Fleet()
    names = ["a", *others]
    fleet.update({name: ReplicaAddress(name, f"tcp://{name}", "secret") for name in names})
    load = ReplicaLoad(pages_free=1000, pages_total=1000, prefill_rate=1000.0, load_rates=(50_000.0,))
    for name in names:
        fleet.record_load(name, load)
    placer = Placer(fleet, PlacerSettings(block_tokens=BLOCK), random.Random(1))
    for number in range(30):
        prompt = Prompt(f"r{number}", [number, *range(399)])
        chain = block_hashes(prompt.prompt_ids, prefix_root(Namespace(prompt.model)), BLOCK)
        on_host = others[:3]
        for name in on_host:
            placer.apply_delta(name, chain, [])
            placer.apply_tiers(name, chain[20:], [HOST] * 80)
        first = placer.place(prompt, names)
        assert first.order[0] in on_host
        record = placer.decision(prompt.request_id)
        assert record is not None and record.predicted_cached == 400
        assert record.predicted_tiers == {"device": 80, "host": 320}
        assert record.terms[record.replica].load == pytest.approx(320 / 50_000)
        placer.release(prompt.request_id)
        placer.apply_delta(record.replica, [], chain)  # as if it had never come
        placer.apply_delta("a", chain, [])
        again = Prompt(f"again{number}", prompt.prompt_ids)
        assert placer.place(again, names).order[0] == "a"
        record = placer.decision(again.request_id)
        assert record is not None and record.predicted_tiers == {"device": 400}
        placer.release(again.request_id)


def test_a_request_that_another_replica_takes_is_explained_again() -> None:
    fleet = Fleet()
    fleet.update({name: ReplicaAddress(name, f"tcp://{name}", "secret") for name in "ab"})
    placer = Placer(fleet, PlacerSettings(block_tokens=BLOCK), random.Random(1))
    prompt = Prompt("r", list(range(40)))
    chain = block_hashes(prompt.prompt_ids, prefix_root(Namespace(prompt.model)), BLOCK)
    placer.apply_delta("b", chain, [])
    placer.apply_tiers("b", chain, [HOST] * 10)
    placer.apply_tiers("gone", chain, [HOST] * 10)
    fleet.open("r")
    chosen = placer.place(prompt, "ab").order[0]
    other = "a" if chosen == "b" else "b"
    placer.overrule("r", other)
    record = placer.decision("r")
    assert record is not None and record.replica == other
    assert record.predicted_tiers == ({"host": 40} if other == "b" else {})
