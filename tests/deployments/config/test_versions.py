"""Versions of a model in the configuration: their names, weights and rollouts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from deployments.app import bind_engines
from deployments.config.args import AppArgs
from deployments.config.versions import VersionPlan
from tests.support.bound_deployments import deployments_of

LIMITS = {"abort_on": {"error_rate": 0.05}}


def entry(version: str | None = None, name: str = "chat", **more: Any) -> dict[str, Any]:
    named = {} if version is None else {"version": version}
    return {"engine": {"served_name": name}, **named, **more}


def plans(*entries: dict[str, Any]) -> tuple[VersionPlan, ...]:
    return AppArgs.model_validate({"models": entries}).versions


def test_versions_of_one_name_are_one_model_with_deployments_of_their_own() -> None:
    args = AppArgs.model_validate({"models": [entry("v1", weight=3), entry("v2"), entry(name="other")]})
    assert [(model.name, model.label) for model in args.served.values()] == [
        ("chat", "chat@v1"),
        ("chat", "chat@v2"),
        ("other", "other"),
    ]
    assert len(args.served) == 3
    (plan,) = args.versions
    assert (plan.model, plan.weights, plan.new) == ("chat", {"v1": 3.0, "v2": 1.0}, None)
    assert plan.weights_at(0) == {"v1": 0.75, "v2": 0.25}


def test_engines_report_and_keep_prefixes_under_their_versions_name() -> None:
    args = AppArgs.model_validate({"models": [entry("v1"), entry("v2")]})
    for name, model in args.served.items():
        (bound,) = deployments_of(bind_engines(args, model, None, name)[name]).values()
        assert bound.replica_config.init_args[0].name == model.label


def test_a_rollout_begins_with_none_of_the_sessions_and_leaves_the_others_their_shares() -> None:
    (plan,) = plans(entry("v1", weight=3), entry("v2", weight=1), entry("v3", rollout=LIMITS))
    assert plan.new == "v3" and plan.rollout is not None
    assert plan.rollout.steps == (1, 10, 50, 100)
    assert plan.weights_at(0) == {"v1": 0.75, "v2": 0.25, "v3": 0.0}
    assert plan.weights_at(20) == pytest.approx({"v1": 0.6, "v2": 0.2, "v3": 0.2})
    assert plan.weights_at(100) == {"v1": 0.0, "v2": 0.0, "v3": 1.0}


def test_a_single_version_only_names_itself() -> None:
    assert [(plan.model, plan.weights) for plan in plans(entry("v1"))] == [("chat", {"v1": 1.0})]
    assert plans(entry(), entry(name="other")) == ()


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([entry("v1"), entry("v1")], r"several models are named \['chat@v1'\]"),
        ([entry("v1"), entry(name="chat@v1")], r"several models are named \['chat@v1'\]"),
        ([entry("v1"), entry()], "an entry of the model 'chat' has no version"),
        ([entry(weight=1)], "an entry of the model 'chat' has no version"),
        ([entry(rollout=LIMITS)], "an entry of the model 'chat' has no version"),
        ([entry("v1", weight=0), entry("v2", weight=0)], "has no version with a weight above 0"),
        (
            [entry("v1", weight=0), entry("v2", rollout=LIMITS)],
            "has no version besides the one that is rolled",
        ),
        ([entry("v1", rollout=LIMITS)], "has no version besides the one that is rolled out"),
        ([entry("v1"), entry("v2", weight=-1)], "greater than or equal to 0"),
        ([entry("v1"), entry("v2", weight=float("inf"))], "finite"),
        ([entry("v 1")], "pattern"),
        ([entry("v1"), entry("v2", weight=1, rollout=LIMITS)], "which sets its weight: remove weight"),
        ([entry("v1"), entry("v2", rollout=LIMITS), entry("v3", rollout=LIMITS)], "2 versions .* have a rollout"),
    ],
)
def test_contradictions_are_named(entries: list[dict[str, Any]], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        plans(*entries)


@pytest.mark.parametrize(
    ("rollout", "complaint"),
    [
        ({"steps": [1, 10]}, r"ascend to 100, got \[1, 10\]"),
        ({"steps": [10, 10, 100]}, "ascend to 100"),
        ({"steps": [50, 10, 100]}, "ascend to 100"),
        ({"steps": []}, "ascend to 100"),
        ({"steps": [0, 100]}, "greater than 0"),
        ({"steps": [50, 101]}, "less than or equal to 100"),
        ({"hold_s": 0}, "hold_s"),
        ({"min_requests": 0}, "min_requests"),
        ({"abort_on": {"errors": 1}}, "unknown setting 'errors'"),
        ({"abort_on": {"error_rate": 1}}, "less than 1"),
        ({"abort_on": {"ttft_p95": 0}}, "ttft_p95"),
        ({"abort_on": {}}, "abort_on has no limit"),
        ({"step": [100]}, "unknown setting 'step'; did you mean steps"),
    ],
)
def test_mistakes_in_a_rollout_are_named(rollout: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        plans(entry("v1"), entry("v2", rollout=LIMITS | rollout))
