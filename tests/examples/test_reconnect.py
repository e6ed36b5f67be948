"""The examples that continue streams, against the API over connections that break off after a few events."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest

from deployments.api import ApiService, create_app
from tests.deployments.support.breaking_server import Breaking, served
from tests.deployments.support.scripted_api import ScriptedEngine, codec, engine, metrics, service

__all__ = ["codec", "engine", "metrics", "service"]
ROOT = Path(__file__).resolve().parents[2]
TEXT = "The quick brown fox: “jumps”\n\nover\u2028the lazy dog."
PYTHON, NODE = [sys.executable, "examples/reconnect.py"], [which("node") or "node", "examples/reconnect.js"]


@pytest.fixture
def breaking(service: ApiService) -> Breaking:
    return Breaking(create_app(service), num_events=9)


@pytest.fixture
def url(breaking: Breaking, engine: ScriptedEngine) -> Iterator[str]:
    engine.says, engine.keeps = TEXT, True
    with served(breaking) as url:
        yield url


def run(command: list[str], url: str) -> subprocess.CompletedProcess[str]:
    if which(command[0]) is None:
        pytest.skip("there is no node on this machine")
    arguments = ["Hi", url] if command is NODE else ["Hi", "--url", url]
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("command", [PYTHON, NODE], ids=["python", "node"])
def test_a_chat_continues_where_it_stopped(
    command: list[str], url: str, breaking: Breaking, engine: ScriptedEngine
) -> None:
    breaking.refusals = [503]
    result = run(command, url)
    assert (result.stdout, result.stderr) == (f"{TEXT}\n", "")
    assert len(breaking.last_ids) > 3 and len(set(breaking.last_ids)) == len(breaking.last_ids) - 1
    assert len(engine.requests) == 1


@pytest.mark.parametrize("command", [PYTHON, NODE], ids=["python", "node"])
def test_a_chat_ends_with_an_error_that_does_not_pass(command: list[str], url: str, breaking: Breaking) -> None:
    breaking.refusals = [409]
    result = run(command, url)
    assert result.returncode == 1 and TEXT.startswith(result.stdout.strip()) and result.stdout.strip()
    assert len(breaking.last_ids) == 2


def test_a_response_in_the_background_continues_where_it_stopped(url: str, breaking: Breaking) -> None:
    breaking.num_events = 15
    result = run([sys.executable, "examples/background_response.py"], url)
    assert (result.stdout, result.stderr) == (f"{TEXT}\n", "")
    assert sum(asked.startswith("GET /v1/responses/resp_") for asked in breaking.asked) > 1
