"""The memory of where prompts went: a conversation finds its replica again, and forgets in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.node import Namespace
from cache.prefix_hash import prefix_root
from router.recent import MAX_PAGES, RecentPrefixes

ROOT = prefix_root(Namespace("m"))
ids = st.lists(st.integers(0, 3), max_size=40)


def test_the_next_turn_follows_the_last() -> None:
    recent = RecentPrefixes(page_size=4)
    first_turn = list(range(10))
    recent.record(recent.chain(first_turn, ROOT), "a")
    assert recent.find(recent.chain([*first_turn, 90, 91, 92], ROOT), {"a", "b"}) == ("a", 8)
    assert recent.find(recent.chain(first_turn, prefix_root(Namespace("m", salt="salt"))), {"a", "b"}) == (None, 0)


def test_a_replica_that_is_gone_is_not_found_and_a_shorter_match_on_a_living_one_is() -> None:
    recent = RecentPrefixes(page_size=2)
    recent.record(recent.chain([1, 2], ROOT), "a")
    recent.record(recent.chain([1, 2, 3, 4], ROOT)[1:], "gone")
    assert recent.find(recent.chain([1, 2, 3, 4, 5, 6], ROOT), {"a"}) == ("a", 2)


@given(st.lists(st.tuples(ids, st.sampled_from("abc")), max_size=8), ids, st.integers(1, 5))
def test_it_finds_the_longest_recorded_beginning(
    sent: list[tuple[list[int], str]], prompt: list[int], page_size: int
) -> None:
    recent = RecentPrefixes(page_size)
    latest: dict[tuple[int, ...], str] = {}
    for tokens, replica in sent:
        recent.record(recent.chain(tokens, ROOT), replica)
        for end in range(page_size, len(tokens) + 1, page_size):
            latest[tuple(tokens[:end])] = replica
    held = [end for end in range(page_size, len(prompt) + 1, page_size) if tuple(prompt[:end]) in latest]
    expected = (latest[tuple(prompt[: held[-1]])], held[-1]) if held else (None, 0)
    assert recent.find(recent.chain(prompt, ROOT), set("abc")) == expected


def test_it_is_bounded() -> None:
    recent = RecentPrefixes(page_size=1, capacity=10)
    for start in range(20):
        recent.record(recent.chain([start], ROOT), "a")
    assert recent.find(recent.chain([19], ROOT), {"a"}) == ("a", 1)
    assert recent.find(recent.chain([3], ROOT), {"a"}) == (None, 0)
    assert len(recent.chain(list(range(1000)), ROOT)) == MAX_PAGES
