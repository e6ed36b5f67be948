"""The application's arguments: what the YAML may contain, and the errors about its mistakes."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from deployments.config import args as config
from deployments.config.args import AppArgs, ModelArgs
from deployments.config.tenants import TenantSettings

ROOT = Path(__file__).resolve().parents[3]


def test_the_shipped_yaml_has_the_settings_that_the_readme_promises() -> None:
    document = yaml.safe_load((ROOT / "deployments.yaml").read_text())
    (application,) = document["applications"]
    arguments = AppArgs.model_validate(application["args"])
    assert application["import_path"] == "deployments.app:build"
    ((deployment, model),) = arguments.served.items()
    assert (deployment, model.name, model.engines.count) == ("EngineReplica", "demo", 2)
    assert model.gpus_per_engine == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"enigne": {}}, "enigne"),
        ({"engine": {"modell": "x"}}, "modell"),
        ({"engine": {"page_size": 0}}, "page_size"),
        ({"engine": {"page_size": "many"}}, "page_size"),
        ({"engine": {"policy": "lifo"}}, "policy must be one of fair, fcfs, priority; got 'lifo'"),
        ({"engine": {"policy": None}}, "engine.policy"),
        ({"engine": {"priority_half_life_s": 0}}, "priority_half_life_s must be above 0 and at most 1e"),
        ({"engine": {"priority_half_life_s": -1}}, "priority_half_life_s must be above 0"),
        ({"engine": {"priority_half_life_s": float("nan")}}, "priority_half_life_s must be above 0"),
        ({"engine": {"priority_half_life_s": 1e9}}, "priority_half_life_s must be above 0 and at most"),
        ({"engine": {"fair_quantum_tokens": 0}}, r"fair_quantum_tokens must be in \[1,"),
        ({"engine": {"max_step_stretch": 0}}, "max_step_stretch must be a number above 0, or None for no bound"),
        ({"engine": {"max_step_stretch": float("inf")}}, "max_step_stretch must be a number above 0"),
        ({"engine": {"max_step_ms": -5}}, "max_step_ms must be a number above 0, or None for no bound; got -5"),
        (
            {"engine": {"speculation": {"methode": "ngram"}}},
            "speculation: unknown setting 'methode'",
        ),
        ({"engine": {"speculation": {"method": "guess"}}}, "speculation.method"),
        ({"engine": {"speculation": {"max_drafts": 0}}}, "speculation.max_drafts must be in"),
        ({"engine": {"speculation": {"min_match": 9}}}, r"speculation.min_match must be in \[1, 8\]"),
        ({"engine": {"speculation": {"method": "draft_model"}}}, "name a draft model"),
        ({"engine": {"speculation": {"model": "demo"}}}, "leave it out"),
        ({"engines": {"count": 0}}, "count"),
        ({"router": {"policy": "guess"}}, "unknown routing policy 'guess'; there are cost"),
        ({"router": {"policy": "my_module.MyPolicy"}}, "a class of your own as package.module:Class"),
        ({"health": {"heartbeat_s": 5}}, "heartbeat_s"),
        ({"wire": {"ports": [20100, 20000]}}, "ports must be"),
        ({"wire": {"ports": [80, 90]}}, "ports must be"),
        ({"limits": {"max_choises": 3}}, "max_choises"),
        ({"engines": {"autoscaling": {"min": 2}}}, "autoscaling.max"),
        ({"engines": {"autoscaling": {"min": 3, "max": 2}}}, r"max \(2\) must be at least min \(3\)"),
        ({"engines": {"autoscaling": {"max": 2, "initial": 5}}}, "initial"),
        ({"engines": {"count": 2, "autoscaling": {"max": 2}}}, "cannot be combined"),
        ({"ingresses": {"autoscaling": {"max": 2}}}, "unknown setting 'autoscaling'"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        AppArgs.model_validate(arguments)


def test_as_many_prefixes_are_fetched_together_from_a_leaving_replica_as_it_sends() -> None:
    args = AppArgs.model_validate({"engines": {"kv_fetch": {"max_transfers": 3, "keep_tokens": 500}}})
    placer = args.placer(args.served["EngineReplica"])
    assert (placer.keep_at_once, placer.keep_tokens) == (3, 500)
    off = AppArgs.model_validate({"engines": {"kv_fetch": None}})
    assert off.placer(off.served["EngineReplica"]).keep_tokens == 0


def test_an_engine_on_a_gpu_takes_one_unless_set_otherwise() -> None:
    assert ModelArgs.model_validate({"engine": {"device": "cuda"}}).gpus_per_engine == 1
    half = {"engine": {"device": "cuda"}, "engines": {"num_gpus": 0.5}}
    assert ModelArgs.model_validate(half).gpus_per_engine == 0.5


def test_every_setting_is_documented() -> None:
    named = (value for value in vars(config).values() if isinstance(value, type))
    models: list[type[BaseModel]] = [TenantSettings, *(kind for kind in named if issubclass(kind, BaseModel))]
    classes = {kind for model in models for kind in model.mro() if issubclass(kind, BaseModel)}
    silent = [
        f"{kind.__name__}.{name}"
        for kind in classes - {BaseModel}
        for name in (inspect.get_annotations(kind).keys() & kind.model_fields.keys()) - documented(kind)
    ]
    assert silent == []


def documented(kind: type) -> set[str]:
    """Names of a class that a docstring follows."""
    body = cast(ast.ClassDef, ast.parse(inspect.getsource(kind)).body[0]).body
    return {
        cast(ast.Name, one.target).id
        for one, next in pairwise(body)
        if isinstance(one, ast.AnnAssign) and isinstance(next, ast.Expr) and isinstance(next.value, ast.Constant)
    }
