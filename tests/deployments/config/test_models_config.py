"""Several models in the configuration, as `models` or in the form for a single one, and their deployments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.app import bind_engines
from deployments.cli.errors import UserError
from deployments.cli.serve_config import Overrides, load, models
from deployments.config.args import AppArgs, ModelArgs
from deployments.replica.autoscaling import keep
from tests.support.bound_deployments import deployments_of

ROOT = Path(__file__).resolve().parents[3]
TWO_MODELS = ROOT / "examples/config/two_models.yaml"


def named(*names: str) -> list[dict[str, Any]]:
    return [{"engine": {"served_name": name}} for name in names]


def test_the_single_form_means_one_model_in_the_deployment_it_always_had() -> None:
    args = AppArgs.model_validate({"engine": {"model": "big", "page_size": 8}, "engines": {"count": 3}})
    assert args.served == {"EngineReplica": ModelArgs(engine=args.engine, engines=args.engines)}
    assert [(name, model.name) for name, model in AppArgs().served.items()] == [("EngineReplica", "demo")]


def test_the_shipped_yaml_is_two_models_that_serve_may_scale() -> None:
    document = yaml.safe_load(TWO_MODELS.read_text())
    ServeDeploySchema.model_validate(document)
    (application,) = document["applications"]
    args = AppArgs.model_validate(application["args"])
    assert list(args.served) == ["EngineReplica-demo-long", "EngineReplica-demo-short"]
    assert application["external_scaler_enabled"] is True


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"models": named("a", "b", "a")}, r"several models are named \['a'\]; .*served_name"),
        ({"models": [{}, {}]}, r"several models are named \['demo'\]"),
        ({"models": named("a"), "engine": {}}, "either models or engine, not both"),
        ({"models": named("a"), "engine": {}, "engines": {}}, "either models or engine and engines, not both"),
        ({"models": named("a"), "chat": {}}, "either models or chat, not both"),
        ({"models": [{"chat": {"tools": "xml"}}]}, "hermes"),
        ({"chat": {"tool": "none"}}, "unknown setting 'tool'; did you mean tools"),
        ({"models": []}, "models is empty"),
        ({"models": [{"engine": {"modell": "x"}}]}, "modell"),
        ({"models": [{"load_at_strat": False}]}, "load_at_strat"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        AppArgs.model_validate(arguments)


@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=5, unique=True), st.randoms())
def test_deployments_are_named_only_by_their_model(names: list[str], rng: Any) -> None:
    """No two deployments share a name, and adding, removing or reordering models changes none."""
    served = AppArgs.model_validate({"models": named(*names)}).served
    assert [model.name for model in served.values()] == names
    some = rng.sample(names, rng.randint(1, len(names)))
    for deployment, model in AppArgs.model_validate({"models": named(*some)}).served.items():
        assert served[deployment] == model


def test_hub_ids_become_names_that_serve_and_shells_take() -> None:
    (deployment,) = AppArgs.model_validate({"models": named("Qwen/Qwen3-0.6B")}).served
    assert deployment.startswith("EngineReplica-Qwen-Qwen3-0.6B-")


def options(**model: Any) -> Any:
    """Serve's configuration of a model's engine deployment."""
    args = AppArgs.model_validate({"models": [model]})
    ((name, settings),) = args.served.items()
    return deployments_of(bind_engines(args, settings, None, name)[name])[name].config


def test_a_model_that_is_not_loaded_at_the_start_has_no_replica_until_it_is_loaded() -> None:
    config = options(load_at_start=False, engines={"count": 3}).autoscaling_config
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (0, 0, 3)
    assert config.policy.policy_function == "deployments.replica.autoscaling:keep"
    for target in (0, 3):
        assert keep(type("Context", (), {"target_num_replicas": target}))[0] == target
    loaded = options(engines={"count": 3})
    assert loaded.autoscaling_config is None and loaded.num_replicas == 3


def test_loading_begins_with_the_count_or_the_autoscalings_first() -> None:
    for engines, count in (
        ({"count": 3}, 3),
        ({"autoscaling": {"min": 2, "max": 5}}, 2),
        ({"autoscaling": {"min": 2, "initial": 4, "max": 5}}, 4),
        ({"autoscaling": {"min": 0, "max": 5}}, 1),
    ):
        (pool,) = ModelArgs.model_validate({"engines": engines}).engines.pools
        assert pool.num_when_loaded == count


def test_each_model_writes_calls_in_its_own_way() -> None:
    models = [
        {**model, "chat": {"tools": form}} for model, form in zip(named("a", "b"), ("llama3", "none"), strict=True)
    ]
    args = AppArgs.model_validate({"models": models})
    assert [model.chat.tools for model in args.served.values()] == ["llama3", "none"]
    (alone,) = AppArgs.model_validate({"chat": {"reasoning": "none"}}).served.values()
    assert (alone.chat.tools, alone.chat.reasoning) == ("auto", "none")


def test_autoscaled_models_begin_as_before_and_not_at_all_when_set_so() -> None:
    for least, load_at_start, initial in ((2, True, 2), (2, False, 0), (0, True, 0)):
        config = options(engines={"autoscaling": {"min": least, "max": 5}}, load_at_start=load_at_start)
        assert config.autoscaling_config.initial_replicas == initial
        assert config.autoscaling_config.policy.policy_kwargs["least"] == least


def test_the_command_line_knows_all_models_and_changes_none_of_several(tmp_path: Path) -> None:
    assert models(load(TWO_MODELS, Overrides(port=1))) == [("demo", None)] * 2
    for overrides in (Overrides(model="x"), Overrides(replicas=2)):
        with pytest.raises(UserError, match="need a config with one model, but it has several"):
            load(TWO_MODELS, overrides)
