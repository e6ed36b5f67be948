"""Emptying the caches of a model: every replica that is known has answered, or an error names it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from deployments.client.protocol import ModelState, Unavailable
from deployments.ingress import cache_reset
from deployments.ingress.cache_reset import empty_caches

Answers = Sequence[tuple[str, int] | BaseException]


def emptied(
    known: Sequence[set[str]],
    answers: Sequence[Answers],
    timeout_s: float = 60.0,
    states: Sequence[ModelState | None] = ("loaded",),
) -> dict[str, int]:
    """Empty the caches where each look at what is known, and each question, has the next result, or the last."""
    looks, asks, later_states = list(known), list(answers), list(states)

    def look() -> set[str]:
        return looks.pop(0) if len(looks) > 1 else looks[0]

    async def ask() -> Answers:
        return asks.pop(0) if len(asks) > 1 else asks[0]

    async def state() -> ModelState | None:
        return later_states.pop(0) if len(later_states) > 1 else later_states[0]

    return asyncio.run(empty_caches("m", look, ask, state, timeout_s))


@pytest.fixture(autouse=True)
def retries_are_immediate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_reset, "RETRY_S", 0.0)


def test_each_replica_reports_the_tokens_that_it_freed() -> None:
    assert emptied([{"a", "b"}], [[("a", 3), ("b", 0)]]) == {"a": 3, "b": 0}


def test_a_replica_that_is_reached_later_is_asked_again() -> None:
    assert emptied([{"a", "b"}], [[("a", 3)], [("a", 1), ("b", 2)]]) == {"a": 4, "b": 2}


def test_an_ingress_that_knows_no_replica_yet_does_not_report_that_all_is_done() -> None:
    assert emptied([set(), {"a"}], [[], [("a", 3)]]) == {"a": 3}


@pytest.mark.parametrize("state", ["loading", "unloaded", "draining"])
def test_a_model_without_a_replica_has_no_cache_to_empty(state: ModelState) -> None:
    assert emptied([set()], [[]], states=[state]) == {}
    assert emptied([{"a"}, set()], [[]], states=["loaded", state]) == {}


def test_replicas_that_still_end_their_streams_empty_their_caches() -> None:
    assert emptied([{"a"}], [[], [("a", 3)]], states=["draining"]) == {"a": 3}


def test_a_controller_that_does_not_answer_does_not_mean_that_there_is_no_cache() -> None:
    assert emptied([set(), {"a"}], [[], [("a", 3)]], states=[None]) == {"a": 3}


def test_a_replica_that_fails_is_an_error() -> None:
    with pytest.raises(Unavailable, match="1 of 2 replicas of m"):
        emptied([{"a", "b"}], [[("a", 3), RuntimeError("stopped")]])


@pytest.mark.parametrize(("known", "named"), [({"a", "b"}, ": b$"), (set[str](), "none is known")])
def test_a_replica_that_has_not_answered_in_time_is_named_with_the_setting(known: set[str], named: str) -> None:
    answers: list[Answers] = [[("a", 3)] if known else []]
    with pytest.raises(Unavailable, match=f"status_timeout_s.*{named}"):
        emptied([known], answers, timeout_s=0.01)
