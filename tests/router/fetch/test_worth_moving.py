"""What is worth moving first from a replica that leaves, and what only such a replica holds."""

from __future__ import annotations

import math
from array import array

import pytest

from cache import Namespace
from cache.prefix_hash import block_hashes, prefix_root
from router.addresses import ReplicaAddress
from router.fetch.hot_prefixes import HotPrefix
from router.fetch.worth_moving import chance_of_running, moving_seconds, worth_of_prefix, worth_of_stream
from router.fleet import Fleet
from router.member import ReplicaLoad
from router.placer import Placer, PlacerSettings
from tests.router.support.fleets import Prompt

RATE = 10_000.0
BLOCK = 4


def prefix(*uses: tuple[int, float], elsewhere: int = 0, cut: int | None = None) -> HotPrefix:
    tokens = array("i", range(uses[-1][0]))[:cut]
    return HotPrefix(Namespace("m"), tokens, uses, elsewhere=elsewhere)


def saved(found: HotPrefix, horizon_s: float = 100.0) -> float:
    """The tokens that moving it saves."""
    return worth_of_prefix(found, RATE, horizon_s) * moving_seconds(len(found.token_ids) - found.elsewhere, RATE)


def test_a_prefix_counts_its_tokens_as_likely_as_it_is_used() -> None:
    assert saved(prefix((1000, 0.0))) == 0.0
    assert saved(prefix((1000, 0.01))) == pytest.approx(1000 * (1 - math.exp(-1)))
    assert saved(prefix((1000, 9.0))) == pytest.approx(1000)


def test_each_part_counts_the_uses_of_all_that_contain_it_and_only_what_is_lost() -> None:
    likely, less = 1 - math.exp(-0.03 * 100), 1 - math.exp(-0.01 * 100)
    assert saved(prefix((400, 0.02), (1000, 0.01))) == pytest.approx(400 * likely + 600 * less)
    assert saved(prefix((400, 0.02), (1000, 0.01), elsewhere=300)) == pytest.approx(100 * likely + 600 * less)
    assert saved(prefix((400, 0.02), (1000, 0.01), elsewhere=500)) == pytest.approx(500 * less)
    assert saved(prefix((400, 0.02), (1000, 0.01), cut=700)) == pytest.approx(400 * likely + 300 * less)


def test_of_two_with_equal_chances_the_longer_is_worth_more_per_second() -> None:
    assert worth_of_stream(2000, RATE, 0.5) > worth_of_stream(1000, RATE, 0.5) > worth_of_stream(1000, RATE, 0.4)
    assert worth_of_prefix(prefix((2000, 0.01)), RATE) > worth_of_prefix(prefix((1000, 0.01)), RATE)
    assert worth_of_prefix(prefix((2000, 9.0)), RATE) == pytest.approx(worth_of_stream(2000, RATE, 1.0))


def test_a_stream_is_less_likely_to_be_lost_the_more_time_it_has() -> None:
    chances = [chance_of_running(seconds, finish_rate=2.0, num_running=20) for seconds in (0.0, 1.0, 30.0)]
    assert chances == [1.0, pytest.approx(math.exp(-0.1)), pytest.approx(math.exp(-3.0))]
    assert chance_of_running(30.0, finish_rate=0.0, num_running=20) == 1.0  # Nothing is known.
    assert chance_of_running(math.inf, finish_rate=2.0, num_running=20) == 1.0


def test_only_replicas_that_stay_keep_a_prefix() -> None:
    """Machines of one kind are often taken away together."""
    fleet = Fleet()
    fleet.update({name: ReplicaAddress(name, f"tcp://{name}", "secret") for name in "abc"})
    placer = Placer(fleet, PlacerSettings(block_tokens=BLOCK, expect_s=0, hot_tokens=10_000, keep_tokens=10_000))
    shared = list(range(400))
    chain = block_hashes(shared, prefix_root(Namespace(Prompt("r", shared).model)), BLOCK)
    for number in range(3):
        placer.place(Prompt(f"r{number}", [*shared, number]), "c")
        placer.release(f"r{number}")
    placer.replace("c", [])
    placer.replace("a", chain)
    placer.replace("b", chain[:50])

    (found,) = placer.only_held_by("a")
    assert (len(found.token_ids), found.elsewhere) == (400, 200)
    fleet.record_load("b", ReplicaLoad(is_draining=True, seconds_left=30.0))
    (found,) = placer.only_held_by("a")
    assert (len(found.token_ids), found.elsewhere) == (400, 0)
    assert len(next(placer.only_held_by("a", 40)).token_ids) == 40
    assert not list(placer.only_held_by("a", 0))
    placer.replace("c", chain)
    assert not list(placer.only_held_by("a"))
