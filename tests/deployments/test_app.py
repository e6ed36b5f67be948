"""Mistakes that `build` refuses before anything is deployed."""

from __future__ import annotations

import pytest

from deployments.app import build
from deployments.config.args import AppArgs
from tests.support.bound_deployments import deployments_of


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("no_such_module:Mine", "the module no_such_module cannot be imported"),
        ("router.policies:Mine", "the module router.policies has no class Mine"),
        ("router.policies:Decision", "no method decide"),
    ],
)
def test_a_router_policy_that_cannot_be_used_is_refused(policy: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(AppArgs.model_validate({"router": {"policy": policy}}))


def test_a_class_as_router_policy_reaches_every_router() -> None:
    policy = "router.policies:LeastLoadedPolicy"
    application = build(AppArgs.model_validate({"router": {"policy": policy}}))
    config = deployments_of(application)["EngineReplica"].config.request_router_config
    assert config.request_router_kwargs["policy"] == policy
