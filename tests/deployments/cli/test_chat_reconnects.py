"""`raydix chat` continues answers that break off: the scripted API, on connections that end after a few events."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator

import pytest
from rich.console import Console

from deployments.api import ApiService, create_app
from deployments.cli import openai_stream
from deployments.cli.chat import Chat
from deployments.cli.openai_stream import Client
from engine.values.stream_delta import StreamDelta
from tests.deployments.support.breaking_server import Breaking, served
from tests.deployments.support.command_line import raydix
from tests.deployments.support.scripted_api import ScriptedEngine

TEXT = "The quick brown fox jumps over the lazy dog."
NOTICE = "The answer broke off; reconnecting.\n"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_stream, "RECONNECT_S", 0.0)


@pytest.fixture
def breaking(service: ApiService) -> Breaking:
    return Breaking(create_app(service))


@pytest.fixture
def url(breaking: Breaking) -> Iterator[str]:
    with served(breaking) as url:
        yield url


def chat(url: str) -> subprocess.CompletedProcess[str]:
    return raydix("chat", "--url", url, stdin="Hi\n/stats\n")


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("num_events", [1, 2, 5])
def test_an_answer_continues_after_every_break(
    breaking: Breaking, url: str, engine: ScriptedEngine, chunk: int, keeps: bool, num_events: int
) -> None:
    """Whether replicas keep the stream, or it has to be generated again."""
    breaking.num_events, engine.chunk, engine.keeps = num_events, chunk, keeps
    result = chat(url)
    assert result.returncode == 0 and result.stdout.startswith(f"{TEXT}\n")
    assert len(set(breaking.last_ids)) == len(breaking.last_ids) > 1
    assert result.stderr == NOTICE * (len(breaking.last_ids) - 1)
    assert bool(engine.adopted) == keeps and len(engine.requests) == (1 if keeps else len(breaking.last_ids))
    [row] = [line.split() for line in result.stdout.splitlines() if line.split()[1:2] == ["1"]]
    num_generated = [int(cell) for cell in row if cell.isdecimal()][3]
    assert num_generated == len(engine.codec.encode(TEXT, add_special_tokens=False)) + 1


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_service_that_is_away_for_a_while_is_asked_again(breaking: Breaking, url: str, status: int) -> None:
    breaking.num_events, breaking.refusals = 20, [status] * 3
    result = chat(url)
    assert result.stdout.startswith(f"{TEXT}\n") and result.stderr == NOTICE
    assert len(breaking.last_ids) == 5 and len(set(breaking.last_ids[1:])) == 1


def test_an_answer_that_its_engine_dropped_continues(url: str, breaking: Breaking, engine: ScriptedEngine) -> None:
    breaking.num_events = 1000
    engine.fail_after = (2, StreamDelta("", finish_reason="abort"))
    breaking.before_second = lambda: setattr(engine, "fail_after", None)
    result = chat(url)
    assert result.stdout.startswith(f"{TEXT}\n") and result.stderr == NOTICE


def test_it_gives_up_in_the_end(breaking: Breaking, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_stream, "GIVE_UP_S", 0.2)
    breaking.refusals = [503] * 1_000_000
    result = chat(url)
    assert "could not be continued for 0.2 s" in result.stdout and result.stderr == NOTICE
    assert len(breaking.last_ids) > 1


def test_an_error_that_does_not_pass_ends_the_answer(breaking: Breaking, url: str) -> None:
    breaking.refusals = [409]
    result = chat(url)
    assert "error:" in result.stdout and "(HTTP 409)" in result.stdout and len(breaking.last_ids) == 2


def test_a_failure_before_the_first_event_is_reported_immediately(url: str, engine: ScriptedEngine) -> None:
    """The user has nothing yet, and may ask again or not."""
    engine.fail_after = (0, StreamDelta("", finish_reason="abort"))
    result = chat(url)
    assert "error: The engine dropped this request." in result.stdout and result.stderr == ""


class Interrupting(io.StringIO):
    """A terminal at which Ctrl-C is pressed once, when it has shown a word."""

    is_pressed = False

    def write(self, text: str) -> int:
        if not self.is_pressed and "quick" in self.getvalue() + text:
            self.is_pressed = True
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_ends_the_stream_at_the_server(breaking: Breaking, url: str, engine: ScriptedEngine) -> None:
    breaking.num_events, engine.keeps, engine.hangs = 1000, True, True
    with Client(url) as client:
        talk = Chat(client, "demo", Console(file=Interrupting(), width=100), {"temperature": 0.0})
        assert talk.handle("Hi")
    name = next(iter(engine.found))
    assert breaking.asked[-1] == f"DELETE /v1/streams/{name}" and engine.generations[-1].closed
