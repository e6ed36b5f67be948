"""Typos in a Serve config are reported, which Serve itself would not do."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from deployments.cli.serve_config import EMBEDDED_MODEL
from deployments.config.serve_schema import read_serve_config


def test_the_config_that_is_served_without_a_file_is_valid() -> None:
    schema = read_serve_config(EMBEDDED_MODEL)
    assert schema.proxy_location == "Disabled"
    assert [application.name for application in schema.applications] == ["raydix"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda config: config.update(http_option={}), "http_option"),
        (lambda config: config.update(http_options={"prt": 1}), r"http_options\.prt"),
        (lambda config: config["applications"][0].update(route="/"), r"applications\.route"),
        (
            lambda config: config["applications"][0].update(deployments=[{"name": "Ingress", "num_replica": 2}]),
            r"applications\.deployments\.num_replica",
        ),
    ],
)
def test_an_option_that_serve_would_ignore_is_named(change: Any, name: str) -> None:
    config = deepcopy(EMBEDDED_MODEL)
    change(config)
    with pytest.raises(ValueError, match=f"has no option {name}: check the spelling"):
        read_serve_config(config)
