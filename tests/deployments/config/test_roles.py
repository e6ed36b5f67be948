"""Roles that cannot work are refused when the application is described, with what to do."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from deployments.config.args import AppArgs

ROLES: dict[str, Any] = {"roles": {"prefill": 2, "decode": 4}}
ENGINE: dict[str, Any] = {"host_kv_gib": 1}


def test_roles_say_how_many_replicas_there_are() -> None:
    args = AppArgs.model_validate({"engine": ENGINE, "engines": ROLES})
    (model,) = args.served.values()
    assert (model.engines.count, model.engines.num_expected) == (6, 6)
    assert args.placer(model).apart_above_tokens == "auto"
    assert AppArgs.model_validate({"engine": ENGINE, "engines": {**ROLES, "count": 6}}).engines.count == 6
    assert AppArgs().placer(next(iter(AppArgs().served.values()))).apart_above_tokens is None


@pytest.mark.parametrize(
    ("engine", "engines", "complaint"),
    [
        (ENGINE, {"roles": {"prefill": 0, "decode": 4}}, "greater than or equal to 1"),
        (ENGINE, {"roles": {"prefill": 2}}, "Field required"),
        (ENGINE, {"roles": {"prefill": 2, "decode": 1, "mixed": 1}}, "Extra inputs"),
        (
            ENGINE,
            {"roles": {"prefill": 1, "decode": 1, "disaggregate_above_tokens": -1}},
            "greater than or equal to 0",
        ),
        (ENGINE, {"roles": "prefill"}, "valid dictionary"),
        (
            ENGINE,
            {**ROLES, "count": 4},
            "count is 4, but roles has 2 replicas for prefill and 4 for decode: leave out",
        ),
        (ENGINE, {**ROLES, "autoscaling": {"max": 8}}, "roles and autoscaling exclude each other"),
        ({}, ROLES, r"engine\.host_kv_gib is 0: set it"),
        (ENGINE, {**ROLES, "kv_fetch": None}, r"engines\.kv_fetch is null: leave it out"),
        ({**ENGINE, "prefix_cache": False}, ROLES, r"engine\.prefix_cache is false"),
        ({**ENGINE, "tensor_parallel_size": 2}, ROLES, r"engine\.tensor_parallel_size is 2"),
    ],
)
def test_roles_that_cannot_work_are_refused(
    engine: dict[str, Any], engines: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValidationError, match=complaint):
        AppArgs.model_validate({"engine": engine, "engines": engines}).served  # noqa: B018
