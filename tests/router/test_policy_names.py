"""Policies by name: those that are accepted, the errors for others, and the checks on a custom policy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from router.cost import Candidate, RouteQuery
from router.fleet import Fleet
from router.placer import Placer, PlacerSettings
from router.policies import Decision, Split
from router.policy_names import CustomPolicy, PolicyError, check_policy_name, policy_named
from tests.router.support.fleets import Prompt, candidate, query

HERE = __name__


class LastName:
    """The last replica by name."""

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        split = Split(replicas)
        order = sorted((one.replica for one in split.serving), reverse=True)
        return split.decision(order, "rule", "last name", query)


class NeedsArguments(LastName):
    def __init__(self, factor: float) -> None:
        self.factor = factor


class NoPolicy:
    pass


NOT_A_CLASS = LastName()


def test_a_class_of_ones_own_places_and_is_known_by_the_name_it_was_given() -> None:
    policy = policy_named(f"{HERE}:LastName")
    decision = policy.decide(query(100, {"a": 64}), [candidate(name) for name in "abc"], random.Random(0))
    assert decision.order == ("c", "b", "a")
    assert (decision.policy, decision.reason, decision.regret_tokens) == (f"{HERE}:LastName", "rule", 64)
    assert policy.decide(query(), [], random.Random(0)).order == ()


def test_a_placer_takes_it_and_counts_its_decisions() -> None:
    fleet = Fleet()
    fleet.update({"a": None, "b": None})
    placer = Placer(fleet, PlacerSettings(policy=f"{HERE}:LastName"))
    fleet.open("r")
    assert placer.place(Prompt("r", list(range(64))), "ab").order == ("b", "a")
    assert placer.counts() == {(f"{HERE}:LastName", "rule"): 1}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("guess", r"unknown routing policy 'guess'; there are cost, .*random, and .* package\.module:Class"),
        ("a.b", r"unknown routing policy 'a\.b'"),
        ("a:b:c", "unknown routing policy 'a:b:c'"),
        ("a b:C", "unknown routing policy 'a b:C'"),
        ("", "unknown routing policy ''"),
        ("no_such_module:C", r"no_such_module cannot be imported \(ModuleNotFoundError: .*Python path"),
        (f"{HERE}:Missing", "has no class Missing"),
        (f"{HERE}:NOT_A_CLASS", "has no class NOT_A_CLASS"),
        (f"{HERE}:NoPolicy", r"has no method decide\(query, replicas, rng\); see Policy in router/policies.py"),
        (f"{HERE}:NeedsArguments", r"cannot be made without arguments \(TypeError: .*factor"),
    ],
)
def test_an_unusable_policy_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_named(name)


def test_the_form_is_checked_without_importing() -> None:
    assert check_policy_name("no_such_module:C") == "no_such_module:C"
    assert check_policy_name("cost") == "cost"
    with pytest.raises(ValueError, match="unknown routing policy"):
        check_policy_name("linear")  # simulated only


class Returns:
    """A policy that returns what it was given."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def decide(self, *_: object) -> Any:
        return self._result


VALID = Decision(("a", "b"), "rule", "mine", {}, 0)


@pytest.mark.parametrize(
    "result", [None, ["a", "b"], replace(VALID, order=("a",)), replace(VALID, order=("a", "x"))]
)
def test_a_decision_that_would_fail_requests_is_not_used(result: Any) -> None:
    policy = CustomPolicy("m:Mine", Returns(result))
    with pytest.raises(PolicyError, match=r"m:Mine must return a Decision that orders \['a', 'b'\]"):
        policy.decide(query(), [candidate("a"), candidate("b")], random.Random(0))


def test_a_reason_of_its_own_becomes_the_one_that_metrics_know() -> None:
    policy = CustomPolicy("m:Mine", Returns(replace(VALID, reason="because")))  # type: ignore[arg-type]
    assert policy.decide(query(), [candidate("a"), candidate("b")], random.Random(0)).reason == "rule"


def test_its_exception_names_the_policy() -> None:
    class Broken:
        def decide(self, *_: object) -> Any:
            raise ValueError("nothing to choose")

    with pytest.raises(PolicyError, match="m:Mine raised ValueError: nothing to choose"):
        CustomPolicy("m:Mine", Broken()).decide(query(), [candidate("a")], random.Random(0))
