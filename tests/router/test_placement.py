"""Placement: stable under change, the same everywhere, and never to a longer queue for the queue's sake."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.node import Namespace
from cache.prefix_hash import prefix_key, prefix_root
from router.placement import SpillRule, favourites, place

KEYS = st.integers(0, 2**64 - 1)
NAMES = st.lists(st.text("abcdefgh0123", min_size=4, max_size=8), min_size=2, max_size=12, unique=True)
RULE = SpillRule()
ROOT = prefix_root(Namespace("m"))


@given(KEYS, NAMES, st.text("xyz", min_size=4, max_size=6))
def test_a_new_replica_takes_only_its_own_keys(key: int, names: list[str], new: str) -> None:
    before, after = favourites(key, names)[0], favourites(key, [*names, new])[0]
    assert after in (before, new)


@given(KEYS, NAMES)
def test_the_order_of_the_list_does_not_matter(key: int, names: list[str]) -> None:
    assert favourites(key, names) == favourites(key, sorted(names, reverse=True))


@given(KEYS, NAMES, st.data())
def test_a_spill_never_goes_to_a_longer_queue(key: int, names: list[str], data: st.DataObject) -> None:
    loads = {name: float(data.draw(st.integers(0, 200))) for name in names}
    placement = place(key, loads, RULE)
    assert sorted(placement.order) == sorted(names)
    favourite = favourites(key, names)[0]
    if placement.reason == "spill":
        assert loads[placement.order[0]] == min(loads.values()) < loads[favourite]
    else:
        assert placement.order[0] == favourite
        assert loads[favourite] <= RULE.factor * sum(loads.values()) / len(loads) + RULE.slack


def test_requests_with_one_prefix_stay_together_until_their_replica_is_loaded() -> None:
    loads = {"a": 0.0, "b": 0.0}
    key = prefix_key(range(64), ROOT)
    home = favourites(key, list(loads))[0]
    for _ in range(20):
        assert place(key, loads, RULE).order[0] == home
        loads[home] += 1
    loads[home] = 100
    assert place(key, loads, RULE).reason == "spill"


def test_keys_spread_evenly() -> None:
    names = [f"replica-{number}" for number in range(8)]
    homes = [favourites(prefix_key([number], ROOT), names)[0] for number in range(4000)]
    assert all(400 < homes.count(name) < 600 for name in names)


def test_without_a_key_the_least_loaded_comes_first() -> None:
    assert place(None, {"a": 3, "b": 1, "c": 2}, RULE).order == ("b", "c", "a")


def test_one_replica_or_none_is_no_choice() -> None:
    assert place(1, {"a": 1e9}, RULE).order == ("a",)
    assert place(1, {}, RULE).order == ()


def test_all_processes_agree() -> None:
    program = (
        "from router.placement import favourites; from cache.prefix_hash import *;"
        "print(favourites(prefix_key(range(64), prefix_root(Namespace('m'))), ['a', 'b', 'c', 'd']))"
    )
    answers = {
        subprocess.check_output([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    }
    assert len(answers) == 1


@pytest.mark.parametrize("bad", [{"factor": 0.9}, {"slack": -1.0}])
def test_rules_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        SpillRule(**bad)
