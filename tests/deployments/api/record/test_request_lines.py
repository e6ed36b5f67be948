"""The line of a request says how it was answered and what was wrong, and can do nothing to a terminal."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import httpx
import pytest

from deployments.api import ApiService, create_app
from deployments.api.http.access import AccessControl
from deployments.api.http.scopes import OWN_PROBE
from deployments.api.record.request_lines import MAX_CHARS
from deployments.client.protocol import ReplicaLost
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from tests.deployments.support.scripted_api import Client, ScriptedEngine, hang_up

ASK = {"model": "demo", "prompt": "The quick", "max_tokens": 4}


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def shown(service: ApiService, lines: list[str]) -> ApiService:
    return replace(service, write_line=lines.append)


@pytest.fixture
def watched(shown: ApiService) -> Client:
    return Client(httpx.ASGITransport(create_app(shown)))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_s_tokens_are_shown(
    watched: Client, engine: ScriptedEngine, lines: list[str], stream: bool
) -> None:
    engine.cached = 2
    watched.post("/v1/completions", {**ASK, "stream": stream})
    num_prompt = len(engine.requests[0].prompt_ids)
    (line,) = lines
    assert re.fullmatch(rf"POST /v1/completions 200 {num_prompt} \+ 4 tokens, 2 cached, \d+ ms", line)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {"model": "demo"}, r"POST /v1/completions 400 \d+ ms: prompt is .*"),
        ("/v1/completions", {**ASK, "temperature": "hot"}, r"POST /v1/completions 400 \d+ ms: temperature .*"),
        ("/v1/messages", {"model": "no"}, r"POST /v1/messages 404 \d+ ms: The model 'no' does not exist .*"),
        ("/nope", {}, r"POST /nope 404 \d+ ms: There is no path '/nope'.*"),
        ("/health", {}, r"POST /health 405 \d+ ms: The method POST .*"),
        ("/tokenize", {"prompt": "a"}, r"POST /tokenize 200 \d+ ms"),
    ],
)
def test_a_line_shows_what_was_wrong(
    watched: Client, lines: list[str], path: str, body: dict[str, object], expected: str
) -> None:
    watched.post(path, body)
    (line,) = lines
    assert re.fullmatch(expected, line), line


def test_a_missing_key_is_shown_and_no_key_is(shown: ApiService, lines: list[str]) -> None:
    tenant = TenantSettings(name="acme", key_hashes=(hash_key("right"),))
    closed = Client(httpx.ASGITransport(create_app(replace(shown, access=AccessControl(KeyRing([tenant]))))))
    closed.post("/v1/completions?key=wrong", ASK, headers={"authorization": "Bearer wrong"})
    (line,) = lines
    assert line.startswith("POST /v1/completions 401 ") and "is not known here" in line and "wrong" not in line


def test_the_line_of_a_stream_that_ends_with_an_error_shows_it(
    watched: Client, engine: ScriptedEngine, lines: list[str]
) -> None:
    engine.fail_after = (2, ReplicaLost("replica-1", "it died"))
    watched.post("/v1/completions", {**ASK, "stream": True})
    (line,) = lines
    assert re.fullmatch(r"POST /v1/completions 200 \d+ \+ 2 tokens, 0 cached, \d+ ms: ended with \w+", line), line


def test_a_client_that_leaves_is_shown(shown: ApiService, engine: ScriptedEngine, lines: list[str]) -> None:
    engine.hangs = True
    asyncio.run(hang_up(shown, {**ASK, "max_tokens": 100}))
    (line,) = lines
    assert line.startswith("POST /v1/completions 499 ") and line.endswith("ms: the client left")


def test_probes_that_find_all_well_have_no_line(watched: Client, engine: ScriptedEngine, lines: list[str]) -> None:
    for path in ("/health", "/ping", "/ready", "/metrics"):
        watched.get(path)
    assert lines == []
    engine.state = "unhealthy"
    watched.get("/health")
    assert [line[:15] for line in lines] == ["GET /health 503"]


def test_the_server_s_own_probe_has_no_line(watched: Client, engine: ScriptedEngine, lines: list[str]) -> None:
    engine.state = "unhealthy"
    for path in ("/health", "/ready", "/v1/models"):
        watched.get(path, headers={"user-agent": OWN_PROBE})
    assert [line.split()[1] for line in lines] == ["/ready", "/v1/models"], "any client can send this header"


def test_a_line_is_short_and_printable(watched: Client, lines: list[str]) -> None:
    watched.get("/v1/models/%1b%5b31m%0aGET%20/fake%20200" + "a" * 400)
    (line,) = lines
    assert line.isprintable() and len(line) <= MAX_CHARS + 1 and " 404 " in line


def test_request_lines_cost_nothing_where_they_are_off(service: ApiService, lines: list[str]) -> None:
    plain, shown = create_app(service), create_app(replace(service, write_line=lines.append))
    assert "RequestLines" not in repr(vars(plain)) and "RequestLines" in repr(vars(shown))
