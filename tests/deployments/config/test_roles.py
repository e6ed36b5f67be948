"""Roles that cannot work are refused when the application is described, with what to do."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from deployments.app import bind_engines
from deployments.config.args import AppArgs
from tests.support.bound_deployments import Bound, deployments_of

ROLES: dict[str, Any] = {"roles": {"prefill": 2, "decode": 4}}
ENGINE: dict[str, Any] = {"host_kv_gib": 1}


def test_roles_determine_the_number_of_replicas() -> None:
    args = AppArgs.model_validate({"engine": ENGINE, "engines": ROLES})
    (model,) = args.served.values()
    assert (model.engines.count, model.engines.num_expected) == (6, 6)
    assert {name: pool.least for name, pool in args.pools.items()} == {
        "EngineReplica:prefill": 2, "EngineReplica:decode": 4
    }  # fmt: skip
    assert args.placer(model).apart_above_tokens == "auto"
    assert AppArgs.model_validate({"engine": ENGINE, "engines": {**ROLES, "count": 6}}).engines.count == 6
    assert AppArgs().placer(next(iter(AppArgs().served.values()))).apart_above_tokens is None


def test_each_role_has_bounds_of_its_own_and_is_a_deployment_of_its_own() -> None:
    scaling = {"prefill": {"min": 1, "max": 4, "ttft_target_s": 0.5}, "decode": 3}
    args = AppArgs.model_validate({"engine": ENGINE, "engines": {"roles": scaling}})
    (model,) = args.served.values()
    assert (model.engines.count, model.engines.num_expected) == (4, 4)
    assert list(bind_engines(args, model, None)) == list(args.pools)
    prefill, decode = bound(args, model, None)
    config = prefill.config.autoscaling_config
    assert config is not None
    assert (config.initial_replicas, config.max_replicas) == (1, 4)
    assert (config.policy.policy_kwargs["role"], config.policy.policy_kwargs["ttft_target_s"]) == ("prefill", 0.5)
    assert decode.config.autoscaling_config is None and decode.config.num_replicas == 3
    assert [one.replica_config.init_args[1].role for one in (prefill, decode)] == ["prefill", "decode"]
    fleets = [one.config.request_router_config.request_router_kwargs["fleet"] for one in (prefill, decode)]
    assert fleets == ["EngineReplica"] * 2  # one router and one index for both


def test_roles_of_several_models_are_deployments_that_no_model_s_name_can_clash_with() -> None:
    apart = {"engine": {**ENGINE, "served_name": "a"}, "engines": ROLES, "load_at_start": False}
    args = AppArgs.model_validate({"models": [apart, {"engine": {"served_name": "a:prefill"}}]})
    assert len(args.pools) == 3
    name, model = next(iter(args.served.items()))
    for role, one in zip(("prefill", "decode"), bound(args, model, None, name), strict=True):
        config = one.config.autoscaling_config
        assert config is not None
        assert (config.initial_replicas, config.max_replicas) == (0, ROLES["roles"][role])


def bound(args: AppArgs, *served: Any) -> list[Bound]:
    """The deployments of a model's roles."""
    return [deployments_of(each)[name] for name, each in bind_engines(args, *served).items()]


@pytest.mark.parametrize(
    ("engine", "engines", "complaint"),
    [
        (ENGINE, {"roles": {"prefill": 0, "decode": 4}}, "greater than or equal to 1"),
        (ENGINE, {"roles": {"prefill": 2}}, "Field required"),
        (ENGINE, {"roles": {"prefill": 2, "decode": 1, "mixed": 1}}, "unknown setting"),
        (
            ENGINE,
            {"roles": {"prefill": 1, "decode": 1, "disaggregate_above_tokens": -1}},
            "greater than or equal to 0",
        ),
        (ENGINE, {"roles": "prefill"}, "valid dictionary"),
        (
            ENGINE,
            {**ROLES, "count": 4},
            "count is 4, but roles has 2 for prefill and 4 for decode: leave out",
        ),
        (
            ENGINE,
            {**ROLES, "autoscaling": {"max": 8}},
            "roles and autoscaling cannot be combined.*prefill: {min: 1",
        ),
        (
            ENGINE,
            {"roles": {"prefill": {"min": 0, "max": 2}, "decode": 1}},
            r"prefill\.min is 0.*Set min to at least 1",
        ),
        (
            ENGINE,
            {"roles": {"prefill": 1, "decode": {"min": 3, "max": 2}}},
            r"engines\.roles\.decode.*\n.*max \(2\) must be at least min \(3\)",
        ),
        (
            ENGINE,
            {"roles": {"prefill": 1, "decode": {"min": 3}}},
            r"engines\.roles\.decode\.autoscaling\.max\n.*Field required",
        ),
        (
            ENGINE,
            {"roles": {"prefill": {"min": 1, "max": 2}, "decode": 2}, "count": 5},
            "count is 5, but roles has 1 for prefill and 2",
        ),
        ({}, ROLES, r"engine\.host_kv_gib is 0: set it"),
        (ENGINE, {**ROLES, "kv_fetch": None}, r"engines\.kv_fetch is null: leave it out"),
        ({**ENGINE, "prefix_cache": False}, ROLES, r"engine\.prefix_cache is false"),
    ],
)
def test_roles_that_cannot_work_are_refused(
    engine: dict[str, Any], engines: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValidationError, match=complaint):
        AppArgs.model_validate({"engine": engine, "engines": engines}).served  # noqa: B018
