"""What running processes take over leaves `args`, so that Serve sees no other version when it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.cli import deploy
from deployments.cli.errors import UserError
from deployments.cli.live_form import live_form
from deployments.cli.ray_environment import LOCAL_ENVIRONMENT, RAY_ENVIRONMENT
from deployments.cli.serve_config import IMPORT_PATH
from deployments.config.args import AppArgs
from deployments.config.live import with_live
from deployments.config.serve_schema import read_serve_config
from deployments.config.tenants import hash_key
from tests.deployments.support.command_line import raydix

TENANT = {"name": "t", "key_hashes": [hash_key("a")]}
LIVE: dict[str, Any] = {
    "limits": {"max_choices": 3},
    "tenants": [TENANT],
    "admin_key_hash": hash_key("root"),
    "protect_metrics": True,
    "router": {"policy": "random"},
    "admission": {"max_wait_s": 9.0},
    "slo": {"ttft_s": 2.0},
    "logging": {"level": "ERROR", "access_log": "/tmp/lines"},
    "tokenizer_info": False,
}


def moved(args: dict[str, Any], *deployments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """`args` and the entries of `deployments`, by name, of the live form."""
    application: dict[str, Any] = {"name": "raydix", "import_path": IMPORT_PATH, "args": args}
    if deployments:
        application["deployments"] = list(deployments)
    form = live_form({"applications": [application]})
    read_serve_config(form)
    [found] = form["applications"]
    return found["args"], {entry["name"]: entry for entry in found["deployments"]}


def test_all_live_settings_go_to_the_ingress_and_the_log_level_also_to_the_hub() -> None:
    args, entries = moved({**LIVE, "engine": {"page_size": 8}})
    assert args == {"engine": {"page_size": 8}}
    assert entries == {
        "Ingress": {"name": "Ingress", "num_replicas": 1, "user_config": LIVE},
        "EngineReplica": {"name": "EngineReplica", "num_replicas": 1},
        "MetricsHub": {"name": "MetricsHub", "user_config": {"logging": {"level": "ERROR"}}},
    }


def test_an_ingress_puts_the_moved_settings_together_again() -> None:
    whole: dict[str, Any] = {**LIVE, "engines": {"num_cpus": 2.0}, "router": {"policy": "random", "expect_s": 3.0}}
    args, entries = moved(whole)
    assert with_live(AppArgs.model_validate(args), entries["Ingress"]["user_config"]) == AppArgs.model_validate(
        whole
    )


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name, value in LIVE.items() if name != "protect_metrics"),
        {"engines": {"count": 4}},
        {"ingresses": {"count": 2}},
        {"engines": {"count": 2}, "ingresses": {"count": 3}, "limits": {"max_prompts": 3}},
        {"limits": {}},
        {"ingresses": {}},
    ],
    ids=lambda change: "-".join(change),
)
def test_a_live_change_leaves_args_as_they_are(change: dict[str, Any]) -> None:
    assert moved(change)[0] == moved({})[0] == {}


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"page_size": 8}},
        {"limits": {"prepare_threads": 3}},
        {"router": {"expect_s": 3.0}},
        {"logging": {"encoding": "json"}},
        {"engines": {"autoscaling": {"max": 3}}},
        {"ingresses": {"port": 9000}},
    ],
    ids=lambda change: "-".join(change),
)
def test_another_change_stays_in_args(change: dict[str, Any]) -> None:
    assert moved(change)[0] == change


def test_numbers_of_replicas_become_those_of_serve() -> None:
    models: list[dict[str, Any]] = [
        {"engine": {"served_name": "a"}, "engines": {"count": 3, "num_cpus": 2}},
        {"engine": {"served_name": "b"}, "engines": {"autoscaling": {"max": 3}}},
        {"engine": {"served_name": "c"}, "engines": {"count": 5}, "load_at_start": False},
    ]
    args, entries = moved({"models": models})
    assert {name: entry.get("num_replicas") for name, entry in entries.items()} == {
        "Ingress": 1,
        "EngineReplica-a": 3,
    }
    assert args["models"][0]["engines"] == {"num_cpus": 2}
    assert args["models"][1:] == models[1:]


def test_roles_have_one_replica_each_in_args() -> None:
    engine = {"host_kv_gib": 1.0}
    args, entries = moved({"engine": engine, "engines": {"roles": {"prefill": 2, "decode": {"min": 1, "max": 3}}}})
    assert args["engines"]["roles"] == {"prefill": 1, "decode": {"min": 1, "max": 3}}
    assert entries["EngineReplica:prefill"]["num_replicas"] == 2
    assert "EngineReplica:decode" not in entries
    args, entries = moved({"engine": engine, "engines": {"count": 5, "roles": {"prefill": 2, "decode": 3}}})
    assert args["engines"] == {"roles": {"prefill": 1, "decode": 1}}
    assert entries["EngineReplica:decode"]["num_replicas"] == 3


def test_settings_under_deployments_take_precedence_over_args() -> None:
    written = {"name": "Ingress", "max_queued_requests": 9, "user_config": {"limits": {"max_choices": 7}}}
    limits = {"max_choices": 3, "max_prompts": 5}
    _, entries = moved({"limits": limits}, written, {"name": "EngineReplica", "num_replicas": 8})
    assert entries["Ingress"] == {
        "name": "Ingress",
        "num_replicas": 1,
        "max_queued_requests": 9,
        "user_config": {"limits": {"max_choices": 7, "max_prompts": 5}},
    }
    assert entries["EngineReplica"]["num_replicas"] == 8


def test_other_applications_stay_as_they_are() -> None:
    other = {"name": "mine", "import_path": "a:b", "args": {"limits": {"max_choices": 3}}}
    assert live_form({"applications": [other]}) == {"applications": [other]}


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"args": {"limits": {"max_choicez": 3}}},
        "args.limits: unknown setting 'max_choicez'; did you mean max_choices?",
    ),
    ({"args": {"limits": {"max_choices": 0}}}, "args.limits.max_choices"),
    (
        {"deployments": [{"name": "Ingress", "user_config": {"limits": {"max_choicez": 3}}}]},
        "deployments: Ingress: user_config: limits: unknown setting 'max_choicez'",
    ),
    (
        {"deployments": [{"name": "Ingress", "user_config": {"engine": {"model": "x"}}}]},
        "Ingress: user_config has engine.model",
    ),
    (
        {"deployments": [{"name": "EngineReplica", "user_config": {"limits": {"max_choices": 3}}}]},
        "EngineReplica: user_config has limits.max_choices",
    ),
    ({"deployments": [{"name": "Engines", "num_replicas": 2}]}, "there is no deployment 'Engines'"),
    ({"deployments": [{"name": "Ingress", "num_replica": 2}]}, "Ray Serve has no option"),
    ({"args": {"engine": {"model": "/nonexistent/model"}}}, "there is no directory /nonexistent/model"),
]


@pytest.mark.parametrize(("part", "message"), WRONG)
def test_deploy_check_names_each_mistake(part: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    application = {"name": "raydix", "import_path": IMPORT_PATH, **part}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    result = raydix("deploy", "--check", str(path))
    assert result.returncode > 0
    assert message in " ".join(result.stderr.split()), result.stderr


def test_deploy_check_passes_a_good_file() -> None:
    result = raydix("deploy", "--check", "deployments.yaml")
    assert result.returncode == 0, result.stderr


def test_deploy_reports_a_missing_file(tmp_path: Path) -> None:
    result = raydix("deploy", str(tmp_path / "none.yaml"))
    assert result.returncode == 2 and "cannot read" in result.stderr


def test_deploy_does_not_choose_between_several_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RAY_ENVIRONMENT, *LOCAL_ENVIRONMENT):
        monkeypatch.setenv(name, "0")  # so that nothing of it is left
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(deploy, "rays_of_this_machine", lambda: frozenset({"10.0.0.1:6379", "127.0.0.1:7000"}))
    with pytest.raises(UserError, match=r"at 10\.0\.0\.1:6379, 127\.0\.0\.1:7000: set RAY_ADDRESS"):
        deploy.run(Path("deployments.yaml"), check=False, verbose=False)
