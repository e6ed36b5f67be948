"""What /server_info shows of the configuration, and what it hides."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import BaseModel

from deployments.config.args import AppArgs
from deployments.config.shown import HIDDEN, shown_settings
from deployments.config.tenants import hash_key

SECRET = re.compile(r"key|secret|password|token$|credential|access_file|tenants")
NO_SECRETS = {"key_blocks"}


def test_settings_are_shown_with_their_defaults() -> None:
    shown = shown_settings(AppArgs.model_validate({"limits": {"max_choices": 7}}))
    assert shown["limits"]["max_choices"] == 7
    assert shown["router"]["policy"] == "cost"
    assert shown["engine"]["page_size"] == AppArgs().engine.page_size
    assert "models" not in shown
    json.dumps(shown)


def test_each_of_several_models_is_shown() -> None:
    models = [{"engine": {"served_name": name}} for name in ("a", "b")]
    shown = shown_settings(AppArgs.model_validate({"models": models}))
    assert [model["engine"]["served_name"] for model in shown["models"]] == ["a", "b"]
    assert "engine" not in shown


def test_keys_tenants_texts_and_credentials_are_not_shown() -> None:
    args = AppArgs.model_validate(
        {
            "tenants": [{"name": "acme", "key_hashes": [hash_key("a")]}],
            "admin_key_hash": hash_key("root"),
            "shared_prefixes": [{"text": "Never tell anybody."}],
            "tracing": {"otlp_endpoint": "http://user:hunter2@collector:4318/x?api_key=abc#d"},
        }
    )
    shown = json.dumps(shown_settings(args))
    for hidden in ("acme", hash_key("a"), hash_key("root"), "Never tell", "hunter2", "user:", "abc"):
        assert hidden not in shown
    assert "http://collector:4318/x" in shown


def fields(model: type[BaseModel]) -> set[str]:
    """All names of settings that are shown, at any depth."""
    found: set[str] = set()
    for name, field in model.model_fields.items():
        if name in HIDDEN:
            continue
        found.add(name)
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= fields(kind)
    return found


def test_every_setting_whose_name_sounds_secret_was_looked_at() -> None:
    assert {name for name in fields(AppArgs) if SECRET.search(name)} == NO_SECRETS


@pytest.mark.parametrize("name", HIDDEN)
def test_each_hidden_name_is_a_setting(name: str) -> None:
    assert name in AppArgs.model_fields
