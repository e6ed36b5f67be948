"""The request log, as Serve's own filters and formatters write it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import httpx
import pytest
from ray.serve._private.common import ServeComponentType
from ray.serve._private.logging_utils import (
    JSONFormatter,
    ServeComponentFilter,
    ServeContextFilter,
    ServeFormatter,
    ServeLogAttributeRemovalFilter,
)

from deployments.api import ApiService, create_app
from deployments.api.http.access import AccessControl
from deployments.client.protocol import Overloaded, ReplicaLost
from deployments.config.settings import LogSettings
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from deployments.telemetry.request_log import RequestLog
from deployments.telemetry.serve_logging import log_through_serve, serve_logging
from tests.deployments.support.scripted_api import Client, ScriptedEngine, hang_up

PROMPT = "a very private prompt"
ASK: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 5}
KEY = "key-of-acme"


class Lines:
    """The lines that Serve's two kinds of handler write, without its files."""

    def __init__(self) -> None:
        self.log = RequestLog("ingress-7")
        self.json, self.text = io.StringIO(), io.StringIO()
        component = ("Ingress", "ingress-7", ServeComponentType.REPLICA)
        made = [(self.text, ServeFormatter("Ingress", "ingress-7")), (self.json, JSONFormatter())]
        self.handlers = []
        for stream, formatter in made:
            handler = logging.StreamHandler(stream)
            handler.setFormatter(formatter)
            for each in (ServeContextFilter(), ServeComponentFilter(*component), ServeLogAttributeRemovalFilter()):
                if stream is self.json:
                    handler.addFilter(each)
            self.handlers.append(handler)

    @property
    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.json.getvalue().splitlines()]

    @property
    def last(self) -> dict[str, Any]:
        return self.all[-1]


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, made = logging.getLogger("ray.serve"), Lines()
    before, logger.level = logger.level, logging.INFO
    for handler in made.handlers:
        logger.addHandler(handler)
    yield made
    for handler in made.handlers:
        logger.removeHandler(handler)
    logger.level = before


@pytest.fixture
def logged(service: ApiService, lines: Lines) -> ApiService:
    tenant = TenantSettings.model_validate({"name": "acme", "key_hashes": [hash_key(KEY)]})
    return replace(service, listeners=(lines.log,), access=AccessControl(KeyRing((tenant,), None)))


@pytest.fixture
def client(logged: ApiService) -> Client:
    return Client(httpx.ASGITransport(create_app(logged)))


def ask(client: Client, request_id: str = "mine", key: str = KEY, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", "x-request-id": request_id}
    return client.post("/v1/completions", ASK | body, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_request_has_one_line(
    client: Client, engine: ScriptedEngine, lines: Lines, stream: bool
) -> None:
    engine.cached = 3
    assert ask(client, stream=stream).status_code == 200
    (line,) = lines.all
    expected = {
        **{"event": "request", "levelname": "INFO", "request_id": "mine", "ingress": "ingress-7"},
        **{"endpoint": "completions", "model": "demo", "tenant": "acme", "outcome": "finished", "status": 200},
        **{"finish_reason": "length", "error_type": None, "reason": None, "stream": stream, "num_choices": 1},
        **{"output_tokens": 5, "cached_tokens": 3, "migrations": 0, "trace_id": None},
    }
    assert line | expected == line
    assert line["response_id"].startswith("cmpl-") and line["total_s"] >= line["time_to_first_token_s"] > 0
    assert "mine" in lines.text.getvalue() and "5 tokens" in lines.text.getvalue()


def test_a_line_has_the_time_at_which_its_request_ended(client: Client, lines: Lines) -> None:
    began = time.time()
    ask(client)
    ended = time.time()
    time.sleep(0.01)  # the line is made with others, later
    (line,) = lines.all
    written = datetime.strptime(line["asctime"], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    assert began - 0.001 <= written <= ended  # it has whole milliseconds


def test_refused_requests(client: Client, engine: ScriptedEngine, lines: Lines) -> None:
    def refused(status: int, **body: Any) -> dict[str, Any]:
        assert ask(client, **body).status_code == status == lines.last["status"]
        assert lines.last["outcome"] == "refused" and lines.last["levelname"] == "INFO"
        return lines.last

    assert refused(400, temperature=-1)["error_type"] == "invalid_request_error"
    assert refused(404, model="another")["model"] is None
    assert refused(401, key="key-of-nobody")["tenant"] != "acme"
    engine.refuse_with = Overloaded("full", 3.0)
    assert refused(429)["reason"] == "queue_full"
    assert refused(429)["output_tokens"] == 0
    assert client.get("/health").status_code and len(lines.all) == 5


def test_failed_requests(client: Client, engine: ScriptedEngine, lines: Lines) -> None:
    engine.fail_after = (2, ReplicaLost("replica-1", "died"))
    for stream, status in ((True, 200), (False, 503)):
        assert ask(client, stream=stream).status_code == status == lines.last["status"]
        assert (lines.last["outcome"], lines.last["finish_reason"]) == ("failed", "error")
        assert (lines.last["error_type"], lines.last["output_tokens"]) == ("service_unavailable_error", 2)
        assert lines.last["levelname"] == "WARNING"


@pytest.mark.parametrize("stream", [False, True])
def test_the_request_of_a_lost_client_has_one_line(
    service: ApiService, engine: ScriptedEngine, lines: Lines, stream: bool
) -> None:
    engine.hangs = True
    asyncio.run(hang_up(replace(service, listeners=(lines.log,)), ASK | {"stream": stream}))
    (line,) = lines.all
    assert (line["outcome"], line["finish_reason"]) == ("aborted", "abort")
    assert line["status"] == (200 if stream else 499)


def test_no_line_has_private_text_or_text_that_could_forge_another(client: Client, lines: Lines) -> None:
    ask(client)
    ask(client, key="wrong\x1bkey", model="no\nsuch\x1b[31m")
    ask(client, model="no\nsuch\x1b[31m")
    for forged in ("x" * 5000, "a\x1b[2J", "two words"):
        assert ask(client, request_id=forged).status_code == 400
        assert lines.last["request_id"].startswith("req-")
    assert len(lines.all) == len(lines.text.getvalue().splitlines()) == 6
    for text in (lines.json.getvalue(), lines.text.getvalue()):
        for private in (PROMPT, KEY, "wrong", "such", "\x1b", "xxx"):
            assert private not in text


def test_one_listener_s_defect_is_neither_the_request_s_nor_the_next_one_s(
    logged: ApiService, lines: Lines
) -> None:
    def defective(_: object) -> None:
        raise RuntimeError("broken")

    client = Client(httpx.ASGITransport(create_app(replace(logged, listeners=(defective, *logged.listeners)))))
    assert ask(client).status_code == 200
    assert lines.last["outcome"] == "finished"


def test_log_lines_of_modules_are_written_where_serve_writes(lines: Lines) -> None:
    log_through_serve()
    log_through_serve()
    logging.getLogger("deployments.api.http.transport").error("seen %d", 1)
    logging.getLogger("engine.program.loop").debug("not at this level")
    assert [(line["message"], line["levelname"]) for line in lines.all] == [("seen 1", "ERROR")]


def test_the_settings_become_serve_s() -> None:
    assert serve_logging(LogSettings(requests=False)) is None
    assert serve_logging(LogSettings(encoding="json", level="WARNING", directory="/logs")) == {
        "encoding": "JSON",
        "log_level": "WARNING",
        "logs_dir": "/logs",
    }
