"""Removed settings are accepted with a warning that names them, wherever arguments are read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.config.args import AppArgs
from deployments.config.live import with_live
from deployments.config.removed import REMOVED, log_once
from tests.docs.support.known_names import settings

BESIDE: dict[str, dict[str, Any]] = {
    "engine": {"host_kv_gib": 1, "kv_tier": {"directory": "/kv"}},
    "engines": {"kv_events": {}},
}
"""Settings that a section needs beside the removed one."""


@pytest.fixture(autouse=True)
def nothing_was_warned_of() -> Iterator[None]:
    log_once.cache_clear()
    yield
    log_once.cache_clear()


def given(path: str, value: Any, base: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `value` at `path`."""
    name, _, rest = path.partition(".")
    return {**base, name: given(rest, value, base.get(name, {})) if rest else value}


@pytest.mark.parametrize("path", REMOVED)
@pytest.mark.parametrize("in_models", [False, True])
def test_a_removed_setting_is_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture, path: str, in_models: bool
) -> None:
    section = path.partition(".")[0]
    plain: dict[str, Any] = {section: BESIDE.get(section, {})}
    old = given(path, "nonsense", plain)
    if in_models and section in ("engine", "engines"):
        plain, old = {"models": [plain]}, {"models": [old]}
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert AppArgs.model_validate(old) == AppArgs.model_validate(plain)
        AppArgs.model_validate(old)
    assert caplog.messages == [f"{path} is no longer a setting: Raydix uses {REMOVED[path]}; remove it"]


def test_the_callers_arguments_stay_as_they_are() -> None:
    old = {"wire": {"turn_bytes": 5, "handshake_s": 3}}
    assert AppArgs.model_validate(old).wire.handshake_s == 3
    assert old == {"wire": {"turn_bytes": 5, "handshake_s": 3}}


def test_a_running_ingress_takes_over_a_user_config_that_has_one() -> None:
    changed = with_live(AppArgs(), {"limits": {"inline_body_bytes": 5, "max_choices": 3}})
    assert changed.limits.max_choices == 3


@pytest.mark.parametrize(
    "args", [{"wire": {"turn": 5}}, {"limits": {"turn_bytes": 5}}, {"wire": 5}, {"models": 3}]
)
def test_all_else_is_refused_as_before(args: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AppArgs.model_validate(args)


def test_no_removed_setting_is_one() -> None:
    assert REMOVED.keys() & settings().keys() == set()
