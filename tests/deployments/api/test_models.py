"""Two models behind one API: which one answers, the reports about each, loading and unloading."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from deployments.admission.admission import Admission
from deployments.api import ApiService, Limits, ModelCard, ServedModel, TextCodec, create_app
from deployments.client.model_client import ModelClient
from deployments.client.protocol import ModelState, NotSwitchable, Unavailable
from deployments.config.settings import AdmissionSettings
from monitoring.metrics import Metrics
from tests.deployments.support.api_over_engines import Idle
from tests.deployments.support.scripted_api import Client, ScriptedEngine
from tests.deployments.support.scripted_switch import ScriptedSwitch
from tests.support.metric_values import count_of

KEY = "the key"
ADMIN = {"authorization": f"Bearer {KEY}"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@dataclass
class ScriptedCluster:
    """A cluster that reports that it is there."""

    async def status(self) -> dict[str, Any]:
        return {"object": "cluster.status", "versions": {"ray": "9"}, "missing": {}}

    async def nodes(self) -> dict[str, Any]:
        return {"object": "list", "data": [], "missing": {"nodes": "no answer within 3 s"}}


@dataclass
class Two:
    """The service and the parts it is made of."""

    large: ScriptedEngine
    small: ScriptedEngine
    switch: ScriptedSwitch
    service: ApiService

    def client(self, **changes: Any) -> Client:
        return Client(httpx.ASGITransport(create_app(replace(self.service, **changes))))


@pytest.fixture
def two(codec: TextCodec) -> Two:
    async def metrics_text() -> tuple[bytes, str]:
        return b"", "text/plain"

    large, small, switch = (
        ScriptedEngine(codec, says="I am large."),
        ScriptedEngine(codec, says="I."),
        ScriptedSwitch(),
    )
    models = {
        "org/large": ServedModel(
            ModelCard("org/large", 1, max_model_len=512, vocab_size=4096), large, codec, Metrics("org/large", "i")
        ),
        "small": ServedModel(
            ModelCard("small", 1, max_model_len=32, vocab_size=4096),
            ModelClient(small, Admission(Idle(), AdmissionSettings(), {}), switch),
            codec,
            Metrics("small", "i"),
            switch,
        ),
    }
    key_hash = hashlib.sha256(KEY.encode()).hexdigest()
    service = ApiService(models, metrics_text, Limits(), Metrics("", "i"), admin_key_hash=key_hash)
    return Two(large, small, switch, service)


def test_the_model_named_answers_and_counts(two: Two) -> None:
    client = two.client()
    answer = client.post("/v1/completions", {"model": "org/large", "prompt": "a"}).json()
    assert (answer["model"], answer["choices"][0]["text"]) == ("org/large", "I am large.")
    assert client.post("/v1/completions", {"model": "small", "prompt": "a"}).json()["choices"][0]["text"] == "I."
    assert [request.model for request in (*two.large.requests, *two.small.requests)] == ["org/large", "small"]
    labels = {"endpoint": "completions", "streaming": "false", "finish_reason": "stop"}
    for served in two.service.models.values():
        assert served.metrics is not None and count_of(served.metrics, "requests_total", **labels) == 1


def test_each_model_has_its_own_limits(two: Two) -> None:
    body = {"prompt": list(range(40)), "max_tokens": 1}
    assert two.client().post("/v1/completions", body | {"model": "org/large"}).status_code == 200
    refused = two.client().post("/v1/completions", body | {"model": "small"})
    assert refused.status_code == 400 and "32 tokens" in refused.json()["error"]["message"]
    assert two.client().post("/detokenize", {"model": "small", "tokens": [5] * 33}).status_code == 400
    assert two.client().post("/detokenize", {"model": "org/large", "tokens": [5] * 33}).status_code == 200


@pytest.mark.parametrize("path, body", [("/v1/chat/completions", CHAT), ("/tokenize", {"prompt": "a"})])
@pytest.mark.parametrize(
    "asked, status, code", [("huge", 404, "model_not_found"), (None, 400, None), (7, 400, None)]
)
def test_an_unknown_model_is_answered_with_the_list(
    two: Two, path: str, body: dict[str, Any], asked: object, status: int, code: str | None
) -> None:
    refused = two.client().post(path, body | ({"model": asked} if asked else {}))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (status, code, "model")
    assert "org/large" in error["message"] and "small" in error["message"]


def test_strangers_count_for_no_model(two: Two) -> None:
    two.client().post("/v1/completions", {"model": "huge", "prompt": "a"})
    two.client().post("/v1/completions", {"model": "small", "prompt": 7})
    labels = {"endpoint": "completions", "error_type": "invalid_request_error"}
    small, strangers = two.service.models["small"].metrics, two.service.metrics
    assert small is not None and strangers is not None
    assert count_of(small, "request_errors_total", status="400", **labels) == 1
    labels["error_type"] = "not_found_error"
    assert count_of(strangers, "request_errors_total", status="404", **labels) == 1


def test_models_are_listed_with_their_states(two: Two) -> None:
    for state in ("loaded", "unloaded", None):
        two.switch.now = state
        listed = two.client().get("/v1/models").json()["data"]
        assert [(model["id"], model["state"]) for model in listed] == [("org/large", "loaded"), ("small", state)]
    assert two.client().get("/v1/models/org/large").json() == listed[0]
    assert two.client().get("/v1/models/huge").status_code == 404


@pytest.mark.parametrize(
    "large, small, status",
    [
        ("healthy", "healthy", "healthy"),
        ("healthy", "unhealthy", "degraded"),
        ("degraded", "degraded", "degraded"),
        ("healthy", "unloaded", "healthy"),
        ("unhealthy", "unloaded", "unhealthy"),
        ("unhealthy", "draining", "unhealthy"),
        ("unloaded", "unloaded", "unloaded"),
    ],
)
def test_health_is_of_each_model_and_of_all(two: Two, large: str, small: str, status: str) -> None:
    two.large.state, two.small.state = large, small
    answer = two.client().get("/health")
    body = answer.json()
    assert body["status"] == status
    assert answer.status_code == (503 if status == "unhealthy" else 200)
    assert [model["status"] for model in body["models"].values()] == [large, small]
    assert (body["replicas_up"], body["replicas_expected"], len(body["replicas"])) == (2, 4, 4)


@pytest.mark.parametrize(
    "headers, status",
    [
        ({}, 401),
        ({"authorization": KEY}, 401),
        ({"authorization": "Bearer x"}, 403),
        ({"authorization": "Bearer "}, 401),
    ],
)
@pytest.mark.parametrize("method, path", [("POST", "/v1/models/small/load"), ("DELETE", "/v1/models/small")])
def test_only_the_admin_switches_models(
    two: Two, headers: dict[str, str], status: int, method: str, path: str
) -> None:
    refused = two.client().request(method, path, headers=headers)
    assert refused.status_code == status and two.switch.orders == []
    assert KEY not in refused.text
    assert two.client().request(method, path, headers=ADMIN).status_code == 202
    off = two.client(admin_key_hash=None).request(method, path, headers=ADMIN)
    assert off.status_code == 403 and "admin_key_hash" in off.json()["error"]["message"]


def test_orders_are_carried_out_and_answered_with_the_state(two: Two) -> None:
    client = two.client()
    answers = [client.request("DELETE", "/v1/models/small", headers=ADMIN) for _ in range(2)]
    answers.append(client.post("/v1/models/small/load", headers=ADMIN))
    assert [answer.json()["state"] for answer in answers] == ["draining", "draining", "loading"]
    assert two.switch.orders == ["unload", "unload", "load"]
    assert client.post("/v1/models/huge/load", headers=ADMIN).status_code == 404
    assert client.post("/v1/models/org/large/load", headers=ADMIN).status_code == 409


@pytest.mark.parametrize(
    "refusal, status", [(NotSwitchable("set external_scaler_enabled"), 409), (Unavailable("no controller"), 503)]
)
def test_an_order_that_cannot_be_given_fails_with_the_reason(two: Two, refusal: Exception, status: int) -> None:
    two.switch.refuse_with = refusal
    answer = two.client().post("/v1/models/small/load", headers=ADMIN)
    assert answer.status_code == status and str(refusal)[1:] in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "state, message",
    [
        ("unloaded", "model small is not loaded; POST /v1/models/small/load"),
        ("draining", "model small is not loaded; POST /v1/models/small/load"),
        ("loading", "model small is loading"),
        ("loaded", "no engine replica is up"),
        (None, "no engine replica is up"),
    ],
)
def test_a_request_for_a_model_without_engines_fails_immediately_with_the_reason(
    two: Two, state: ModelState | None, message: str
) -> None:
    two.small.refuse_with, two.switch.now = Unavailable("no engine replica is up"), state
    refused = two.client().post("/v1/completions", {"prompt": "a", "max_tokens": 1, "model": "small"})
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert message in refused.json()["error"]["message"]
    assert two.client().post("/v1/completions", {"model": "org/large", "prompt": "a"}).status_code == 200


def test_the_cluster_is_for_the_admin_where_there_is_one(two: Two) -> None:
    closed, opened = (
        two.client(cluster=ScriptedCluster()),
        two.client(cluster=ScriptedCluster(), admin_key_hash=None),
    )
    for path in ("/v1/cluster/status", "/v1/cluster/nodes"):
        assert closed.get(path).status_code == 401
        assert closed.get(path, headers=ADMIN).json() == opened.get(path).json()
        assert two.client().get(path, headers=ADMIN).status_code == 404
    assert opened.get("/v1/cluster/status").json()["versions"] == {"raydix": two.service.version, "ray": "9"}
