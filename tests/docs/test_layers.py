"""ARCHITECTURE.md draws the layers that import-linter checks."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.docs.support.markdown_pages import ROOT

CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
LAYERED = {
    container: [layer.split(" | ") for layer in contract["layers"]]
    for contract in CONTRACTS
    for container in contract.get("containers", [])
}


@pytest.mark.parametrize("package", LAYERED)
def test_the_layers_of_a_package_are_drawn_as_they_are_checked(package: str) -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    folder = package.replace(".", "/")
    [drawing] = re.findall(rf"^```\n({folder}/ .*?)^```$", page, re.M | re.S)
    rows = drawing.removeprefix(f"{folder}/").splitlines()
    assert [sorted(row.split()) for row in rows] == [sorted(layer) for layer in LAYERED[package]]


def test_there_are_layers_to_draw() -> None:
    assert {"engine", "deployments", "deployments.api"} <= LAYERED.keys()
