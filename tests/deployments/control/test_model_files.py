"""Models without usable files are refused before anything is replaced, unless another node has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.app import ConfigRefused, build
from deployments.cli import deploy
from deployments.cli.errors import UserError
from deployments.config.args import AppArgs, ModelArgs
from deployments.control.model_files import ModelFilesError, check_model_files
from engine.model_files.model_directory import demo_model_path
from tests.engine.support.model_hub import model_hub

MISSING = {"engine": {"model": "/nonexistent/model"}}


def no_other_node(model: ModelArgs) -> dict[str, str | None]:
    raise AssertionError(f"{model.name} is here, so no other node need be asked")


def test_a_model_that_is_here_is_good_enough() -> None:
    check_model_files(AppArgs(), no_other_node)


@pytest.mark.parametrize("elsewhere", [{}, {"10.0.0.2": "there is no directory x"}])
def test_a_model_that_no_node_has_is_refused(elsewhere: dict[str, str | None]) -> None:
    with pytest.raises(ModelFilesError, match="the model /nonexistent/model cannot be loaded: there is no dire"):
        check_model_files(AppArgs.model_validate(MISSING), lambda model: elsewhere)


def test_a_model_that_one_other_node_has_is_good_enough(caplog: pytest.LogCaptureFixture) -> None:
    answers = {"10.0.0.2": None, "10.0.0.3": "there is no directory x"}
    check_model_files(AppArgs.model_validate(MISSING), lambda model: answers)
    assert "cannot be loaded on node 10.0.0.3" in caplog.text


def test_each_of_several_models_is_checked(tmp_path: Path) -> None:
    models: list[dict[str, Any]] = [{"engine": {}}, {"engine": {"model": str(tmp_path), "served_name": "b"}}]
    with pytest.raises(ModelFilesError, match=r"the model b cannot be loaded: .*config\.json"):
        check_model_files(AppArgs.model_validate({"models": models}), lambda model: {})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (MISSING, r"the model /nonexistent/model cannot be loaded: there is no directory"),
        ({"limits": {"max_choicez": 3}}, r"args\.limits: unknown setting 'max_choicez'; did you mean max_choices"),
        ({"limitz": {}}, r"args: unknown setting 'limitz'; did you mean limits"),
        ({"engine": {"page_size": "x"}}, r"args\.engine\.page_size"),
        ({"router": {"policy": "no_such_module:Mine"}}, "cannot be imported"),
    ],
)
def test_build_reports_an_error_in_one_line(args: Any, message: str) -> None:
    """`serve status` shows it as it is."""
    with pytest.raises(ConfigRefused, match=message) as raised:
        build(args)
    assert "\n" not in str(raised.value)


def test_a_model_that_the_hub_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With what is wrong and what to do; `raydix deploy --check` says the same."""
    config = tmp_path / "my.yaml"
    config.write_text(
        yaml.safe_dump(
            {"applications": [{"import_path": "deployments.app:build", "args": {"engine": {"model": "no/such"}}}]}
        )
    )
    message = r"no/such is neither a directory here nor a model on the hub; check the spelling"
    with model_hub(monkeypatch, tmp_path / "cache") as hub:
        with pytest.raises(ConfigRefused, match=f"the model no/such cannot be loaded: {message}"):
            build({"engine": {"model": "no/such"}})
        with pytest.raises(UserError, match=message):
            deploy.run(config, check=True, verbose=False)
        hub.models["no/such"] = demo_model_path()
        deploy.run(config, check=True, verbose=False)
