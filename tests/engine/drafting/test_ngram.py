"""Prompt lookup compared with its definition, and its bounds."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import Namespace
from engine.drafting.ngram import NgramDrafter
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from tests.support.examples import examples


def request(tokens: Sequence[int], name: str = "r") -> Request:
    made = Request.make(name, list(tokens), SamplingParams(), arrival=0.0, seed=0, namespace=Namespace("m"))
    made.longest = len(tokens) + 1000
    return made


def draft(tokens: Sequence[int], most: int = 4, **settings: int) -> list[int]:
    [found] = NgramDrafter(**settings).propose([request(tokens)], [most])
    return list(found)


def by_definition(tokens: list[int], most: int, min_match: int, max_match: int) -> list[int]:
    """Find the longest suffix that occurred earlier, at its latest place, and repeat what followed."""
    for length in range(max_match, min_match - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                grown = list(tokens)
                for offset in range(most):
                    grown.append(grown[place + offset])
                return grown[len(tokens) :]
    return []


def test_tokens_that_followed_the_same_words_are_drafted() -> None:
    assert draft([5, 8, 2, 9, 4, 5, 8], most=3) == [2, 9, 4]


def test_the_longest_match_wins_over_the_latest() -> None:
    assert draft([1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3], most=1) == [70]


def test_among_equal_matches_the_latest_wins() -> None:
    assert draft([2, 3, 70, 2, 3, 80, 2, 3], most=1) == [80]


def test_a_repeated_run_continues_to_repeat() -> None:
    assert draft([7, 1, 2, 1, 2], most=6) == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("tokens", [[], [4], [4, 5], [1, 2, 3, 4]])
def test_nothing_repeats_nothing_is_drafted(tokens: list[int]) -> None:
    assert draft(tokens) == []


@settings(max_examples=examples(200), deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=14),
    grown=st.lists(st.integers(0, 3), max_size=14),
    min_match=st.integers(1, 3),
    more=st.integers(0, 4),
    most=st.integers(1, 6),
)
def test_the_draft_follows_the_definition_token_by_token(
    tokens: list[int], grown: list[int], min_match: int, more: int, most: int
) -> None:
    """Token by token or at once, the draft is the one found by looking at every place."""
    drafter = NgramDrafter(min_match, min_match + more, window=64, most_places=64)
    one = request(tokens)
    for token in [None, *grown]:
        if token is not None:
            one.tokens.append(token)
        [found] = drafter.propose([one], [most])
        assert list(found) == by_definition(one.tokens, most, min_match, min_match + more)


def test_only_the_window_is_searched() -> None:
    distant = [1, 2, 77, *range(100, 140), 1, 2]
    assert draft(distant, most=1, window=64) == [77]
    assert draft(distant, most=1, window=32) == []
    grown = request(distant[:5])
    grown.longest = 32
    drafter = NgramDrafter(window=32)
    for token in distant[5:]:
        drafter.propose([grown], [1])
        grown.tokens.append(token)
    assert drafter.propose([grown], [1]) == [[]]


def test_memory_is_bounded_and_given_back() -> None:
    drafter = NgramDrafter(window=256)
    one = request([token % 50 for token in range(20_000)])
    tracemalloc.start()
    try:
        for _ in range(10):
            drafter.propose([one], [4])
        held = tracemalloc.get_traced_memory()[0]
        drafter.forget(one)
        drafter.forget(one)
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 2 * 4 * 256 <= held - left <= held < 4 * 4 * 256, "two numbers of four bytes for each place"


def test_a_long_prompt_is_worked_off_over_several_steps() -> None:
    drafter, one = NgramDrafter(), request([1, 2, 3, 4, 5] * 2600)
    drafts = [list(drafter.propose([one], [2])[0]) for _ in range(4)]
    assert drafts == [[], [], [], [1, 2]]


def test_requests_do_not_see_each_other_s_tokens() -> None:
    drafter = NgramDrafter()
    a, b = request([1, 2, 3, 1, 2], "a"), request([9, 1, 2], "b")
    assert [list(found) for found in drafter.propose([a, b], [1, 1])] == [[3], []]
