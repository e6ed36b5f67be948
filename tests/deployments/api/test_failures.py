"""The answers when engines refuse, fail or disappear; a client that disconnects costs nothing."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from deployments.api import ApiService, Limits, create_app
from deployments.client.protocol import EndsEngines, Overloaded, Rejected, ReplicaLost, Unavailable
from engine.values.stream_delta import StreamDelta
from monitoring.metrics import Metrics
from tests.deployments.support.scripted_api import Client, ScriptedEngine, hang_up
from tests.support.metric_values import count_of

ASK = {"model": "demo", "prompt": "hi", "max_tokens": 50}


@pytest.mark.parametrize(
    "refusal, status, retry_after",
    [
        (Overloaded("queue full", 3.2), 429, "4"),
        (Unavailable("no engine is up"), 503, "2"),
        (Rejected("too long for any engine", "prompt"), 400, None),
        (EndsEngines(2), 500, None),
        (RuntimeError("secret"), 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_their_status_even_for_streams(
    client: Client, engine: ScriptedEngine, refusal: Exception, status: int, retry_after: str | None, stream: bool
) -> None:
    engine.refuse_with = refusal
    response = client.post("/v1/completions", ASK | {"stream": stream})
    assert response.status_code == status and response.headers.get("retry-after") == retry_after
    assert "secret" not in response.text
    # OpenAI's clients send a request again after errors of the server, but not one that ends engines.
    assert response.headers.get("x-should-retry") == ("false" if isinstance(refusal, EndsEngines) else None)


@pytest.mark.parametrize(
    "failure", [ReplicaLost("replica-1", "died"), StreamDelta("x", finish_reason="error", error="s")]
)
def test_a_failure_in_a_stream_is_its_last_event(
    client: Client, engine: ScriptedEngine, failure: Exception | StreamDelta
) -> None:
    engine.fail_after = (3, failure)
    response = client.post("/v1/completions", ASK | {"stream": True})
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert response.status_code == 200 and len(events) == 4
    error = json.loads(events[-1])["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    assert engine.generations[0].closed
    assert client.post("/v1/completions", ASK).status_code in (500, 503)


def test_a_failure_before_the_first_token_of_a_stream_has_a_status(client: Client, engine: ScriptedEngine) -> None:
    engine.fail_after = (0, ReplicaLost("replica-1", "died"))
    assert client.post("/v1/completions", ASK | {"stream": True}).status_code == 503
    assert engine.generations[0].closed


def test_when_one_choice_fails_the_others_are_aborted(client: Client, engine: ScriptedEngine) -> None:
    engine.fail_after = (2, ReplicaLost("replica-1", "died"))
    assert client.post("/v1/completions", ASK | {"n": 3}).status_code == 503
    assert len(engine.generations) == 3 and all(generation.closed for generation in engine.generations)


def test_a_silent_engine_is_given_up(service: ApiService, engine: ScriptedEngine) -> None:
    engine.hangs = True
    impatient = replace(service, limits=Limits(idle_timeout_s=0.05))
    response = Client(httpx.ASGITransport(create_app(impatient))).post("/v1/completions", ASK)
    assert response.status_code == 504 and engine.generations[0].closed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_disconnects_ends_the_generation(
    service: ApiService, engine: ScriptedEngine, metrics: Metrics, stream: bool, n: int
) -> None:
    engine.hangs = True
    sent = asyncio.run(hang_up(service, ASK | {"stream": stream, "n": n}))
    assert engine.generations and all(generation.closed for generation in engine.generations)
    assert bool(sent) == stream
    labels = {"endpoint": "completions", "streaming": str(stream).lower(), "finish_reason": "abort"}
    assert count_of(metrics, "requests_total", **labels) == 1
    assert count_of(metrics, "stream_disconnects_total") == stream


def test_requests_and_errors_are_counted(client: Client, metrics: Metrics) -> None:
    client.post("/v1/completions", ASK)
    client.post("/v1/completions", ASK | {"stream": True})
    client.post("/v1/completions", ASK | {"n": 0})
    for streaming in ("true", "false"):
        labels = {"endpoint": "completions", "streaming": streaming, "finish_reason": "stop"}
        assert count_of(metrics, "requests_total", **labels) == 1
    labels = {"endpoint": "completions", "status": "400", "error_type": "invalid_request_error"}
    assert count_of(metrics, "request_errors_total", **labels) == 1
    assert count_of(metrics, "stream_disconnects_total") == 0


@pytest.mark.parametrize(
    ("error", "reason"), [(Overloaded("full", 1.0), "queue_full"), (Unavailable("none is up"), "unavailable")]
)
def test_refusals_are_counted_by_reason(
    client: Client, engine: ScriptedEngine, metrics: Metrics, error: Exception, reason: str
) -> None:
    engine.refuse_with = error
    client.post("/v1/completions", ASK)
    assert count_of(metrics, "admission_rejections_total", reason=reason) == 1
    assert (
        sum(count_of(metrics, "admission_rejections_total", reason=r) for r in ("queue_full", "unavailable")) == 1
    )
