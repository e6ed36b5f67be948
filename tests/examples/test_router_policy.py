"""`examples/router_policy.py` in the simulator, run as its first lines say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli.app import app
from tests.router.support.traffic import conversations, write_mooncake

ROOT = Path(__file__).resolve().parents[2]


def test_the_policy_is_simulated_next_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows of caches, so it finds more in them than chance does."""
    monkeypatch.chdir(ROOT)
    trace = write_mooncake(tmp_path / "chat.jsonl", conversations(150))
    policies = "cost,examples.router_policy:MyPolicy,random"
    arguments = ["simulate", trace, "--replicas", 4, "--policy", policies, "--json", tmp_path / "out.json"]
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [row["policy"] for row in rows] == policies.split(",")
    assert rows[1]["hit_rate"] > rows[2]["hit_rate"]
