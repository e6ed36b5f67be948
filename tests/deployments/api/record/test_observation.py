"""Requests are counted in the metrics by route, never by anything that a client sent."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from unittest.mock import Mock

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.api import create_app
from deployments.api.http.scopes import OWN_PROBE
from deployments.api.record.observation import Observation
from deployments.api.record.request_metrics import RequestMetrics
from deployments.api.record.request_record import GenerationStart, RequestRecord
from deployments.api.service.api_service import ApiService
from deployments.config.settings import SloSettings
from monitoring.metrics import Metrics
from tests.deployments.support.scripted_api import MODEL, Client
from tests.support.metric_values import snapshot_of

PROMPT = {"model": MODEL, "prompt": "The quick brown fox", "max_tokens": 4, "temperature": 0}


def values(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    return dict(snapshot_of(metrics).values.get(name, ()))


def observed(metrics: Metrics, name: str) -> list[float]:
    """Return a histogram's count and sum."""
    [(_, histogram)] = snapshot_of(metrics).histograms[name]
    return [sum(histogram.counts), histogram.sum]


def all_series(metrics: Metrics) -> Iterator[tuple[str, tuple[str, ...]]]:
    snapshot = snapshot_of(metrics)
    for name, values in snapshot.values.items():
        yield from ((name, key) for key, _ in values)
    for name, histograms in snapshot.histograms.items():
        yield from ((name, key) for key, _ in histograms)


def test_requests_are_counted_by_route_method_and_status(client: Client, metrics: Metrics) -> None:
    assert client.post("/v1/completions", PROMPT).status_code == 200
    assert client.post("/v1/completions", b"{").status_code == 400
    assert client.get("/v1/models/no-such-model").status_code == 404
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/no/such/path").status_code == 404
    assert client.request("BREW", "/health").status_code == 405
    assert values(metrics, "http_requests_total") == {
        ("/v1/completions", "POST", "200"): 1,
        ("/v1/completions", "POST", "400"): 1,
        ("/v1/models/{model_id:path}", "GET", "404"): 1,
        ("/v1/completions", "GET", "405"): 1,
        ("other", "GET", "404"): 1,
        ("/health", "other", "405"): 1,
    }
    assert values(metrics, "http_inflight_requests") == {(): 0}


def test_the_server_s_own_probe_is_not_counted(client: Client, metrics: Metrics) -> None:
    for path in ("/health", "/ready"):
        assert client.get(path, headers={"user-agent": OWN_PROBE}).status_code == 200
    assert values(metrics, "http_requests_total") == {("/ready", "GET", "200"): 1}


def test_a_request_is_in_flight_until_its_answer_is_over(metrics: Metrics) -> None:
    seen: list[float] = []

    async def app(scope: object, receive: object, send: object) -> None:
        seen.append(values(metrics, "http_inflight_requests")[()])

    async def nothing(*_: object) -> None:
        raise AssertionError

    layer = Observation(app, metrics, ())
    asyncio.run(layer({"type": "http", "method": "GET", "path": "/"}, nothing, nothing))  # type: ignore[arg-type]
    assert seen == [1] and values(metrics, "http_inflight_requests") == {(): 0}
    assert values(metrics, "http_requests_total") == {("other", "GET", "499"): 1}, "it sent no status"


HOSTILE = st.text(st.characters(codec="ascii", exclude_characters="/?#\\"), min_size=12, max_size=30)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(HOSTILE.map(lambda text: "zq" + "".join(c for c in text if c.isalnum()) + "zq"))
def test_nothing_that_a_client_sends_becomes_a_label(client: Client, metrics: Metrics, word: str) -> None:
    headers = {"x-session-id": word, "x-request-id": word, "authorization": f"Bearer {word}", "user-agent": word}
    for model in (MODEL, word):
        body = PROMPT | {"model": model, "user": word, "cache_salt": word, "stop": [word], word: word}
        client.post("/v1/completions", body, headers=headers)
        body = {"model": model, "messages": [{"role": "user", "content": word, "name": word}], "max_tokens": 2}
        client.post("/v1/chat/completions", body, headers=headers)
        client.post("/tokenize", {"model": model, "prompt": word})
    for path in (f"/{word}", f"/v1/models/{word}", f"/v1/router/decisions/{word}", f"/health?{word}={word}"):
        client.get(path, headers=headers)
        client.request(word.upper(), path)
    found = [series for series in all_series(metrics) if any(word.lower() in label.lower() for label in series[1])]
    assert not found
    assert not any("overflow" in key for _, key in all_series(metrics))


class RecordedRequest:
    """A valid request's record, and the clock it looks at."""

    def __init__(self, metrics: Metrics, targets: SloSettings) -> None:
        self.now = 100.0
        self.record = RequestRecord("completions", {}, lambda: self.now)
        self.record.metrics = RequestMetrics(metrics, "completions", targets=targets)
        self.record.accepted(GenerationStart(Mock(), Mock(), False, Mock()))

    def receive(self, choice: int, num_tokens: int, now: float) -> None:
        self.now = now
        self.record.received(choice, num_tokens, is_last=False)


def test_a_request_is_measured_against_its_targets() -> None:
    metrics = Metrics("m", "i")
    request = RecordedRequest(metrics, SloSettings(ttft_s=0.5, itl_s=0.1, e2e_s=10))
    request.receive(0, 1, 100.4)  # within ttft
    request.receive(1, 1, 100.6)  # another choice's first token is not the request's
    request.receive(0, 2, 100.7)  # 0.15 s a token
    request.receive(1, 1, 100.8)  # 0.2 s a token
    request.now = 101.0
    request.record.finished("stop")
    assert values(metrics, "slo_requests_total") == {
        ("ttft", "true"): 1,
        ("ttft", "false"): 0,
        ("itl", "true"): 0,
        ("itl", "false"): 1,
        ("e2e", "true"): 1,
        ("e2e", "false"): 0,
    }
    assert observed(metrics, "time_to_first_token_seconds") == pytest.approx([1, 0.4])
    assert observed(metrics, "time_per_output_token_seconds") == pytest.approx([2, 0.35])
    assert observed(metrics, "inter_token_latency_seconds") == pytest.approx([3, 0.5])
    assert observed(metrics, "request_output_tokens") == [1, 5]


def test_answers_of_one_token_and_broken_ones_are_not_judged_by_times_that_they_lack() -> None:
    metrics = Metrics("m", "i")
    request = RecordedRequest(metrics, SloSettings())
    request.receive(0, 1, 100.1)
    request.now = 100.2
    request.record.disconnected()
    judged = {key for key, count in values(metrics, "slo_requests_total").items() if count}
    assert judged == {("ttft", "true")}
    assert observed(metrics, "time_per_output_token_seconds") == [0, 0.0]


def test_the_size_of_a_request_is_observed(client: Client, metrics: Metrics) -> None:
    usage = client.post("/v1/completions", PROMPT | {"n": 2}).json()["usage"]
    assert observed(metrics, "request_prompt_tokens")[0] == 1
    assert observed(metrics, "request_output_tokens") == [1, usage["completion_tokens"]]


def test_without_metrics_requests_are_answered_all_the_same(service: ApiService) -> None:
    client = Client(httpx.ASGITransport(create_app(dataclasses.replace(service, metrics=None))))
    assert client.get("/version").status_code == 200
