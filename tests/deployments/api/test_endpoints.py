"""The small endpoints, and what every response has in common."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace

import httpx
import pytest

from deployments.api import ApiService, create_app
from deployments.api.routes.health import Readiness
from deployments.config.version import raydix_version
from tests.deployments.support.scripted_api import Client, ScriptedEngine


def test_models_are_listed_and_found_by_name(client: Client) -> None:
    listed = client.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["demo"]
    assert client.get("/v1/models/demo").json() == listed["data"][0]
    missing = client.get("/v1/models/Org/Name")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_tokenize_and_detokenize_are_inverse(client: Client) -> None:
    text = "Grüße, 世界 🌍!"
    tokens = client.post("/tokenize", {"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 512
    assert client.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}


def test_tokenized_messages_are_the_tokens_that_chat_sends_to_the_engine(
    client: Client, engine: ScriptedEngine
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    client.post("/v1/chat/completions", {"model": "demo", "messages": messages})
    assert client.post("/tokenize", {"messages": messages}).json()["tokens"] == engine.requests[0].prompt_ids


@pytest.mark.parametrize(
    "state, status", [("healthy", 200), ("degraded", 200), ("unhealthy", 503), ("draining", 503)]
)
def test_health_reports_the_state_and_the_replicas(
    client: Client, engine: ScriptedEngine, state: str, status: int
) -> None:
    engine.state = state
    response = client.get("/health")
    assert response.status_code == status and response.json()["status"] == state
    assert [replica["replica"] for replica in response.json()["replicas"]] == ["replica-1", "replica-2"]


def test_an_ingress_is_ready_while_an_engine_serves_and_a_little_longer(
    service: ApiService, engine: ScriptedEngine
) -> None:
    now = 0.0
    readiness = Readiness(replace(service, ready_without_engines_s=30.0), lambda: now)
    engine.state = "unhealthy"
    assert asyncio.run(readiness.missing()) == "no engine answers"  # none has ever answered
    engine.state = "degraded"
    assert asyncio.run(readiness.missing()) is None
    engine.state, now = "unhealthy", 30.0
    assert asyncio.run(readiness.missing()) is None
    now = 31.0
    assert asyncio.run(readiness.missing()) == "no engine answers"


def test_readiness_is_a_status_and_a_reason(service: ApiService, client: Client) -> None:
    assert (client.get("/ready").status_code, client.get("/ready").json()) == (200, {"ready": True})
    stopping = Client(httpx.ASGITransport(create_app(replace(service, is_stopping=lambda: True))))
    answer = stopping.get("/ready")
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "reason": "this ingress is being stopped"}


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics", "/v1/models", "/v1/models/demo"])
def test_a_head_is_a_get_without_its_body(client: Client, path: str) -> None:
    head, get = client.request("HEAD", path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(get.content))


@pytest.mark.parametrize("path", ["/health/", "/v1/models/", "/v1/models//"])
def test_a_last_slash_is_ignored(client: Client, path: str) -> None:
    assert client.get(path).json() == client.get(path.rstrip("/")).json()


def test_a_last_slash_is_ignored_where_answers_are_generated(client: Client) -> None:
    answer = client.post("/v1/completions/", {"model": "demo", "prompt": "hello"})
    assert answer.status_code == 200 and answer.json()["choices"]


def test_version_and_metrics(client: Client) -> None:
    assert client.get("/version").json() == {"version": raydix_version()}
    metrics = client.get("/metrics")
    assert metrics.text == "raydix_up 1\n" and metrics.headers["content-type"].startswith("text/plain")


def test_a_request_id_is_given_or_kept(client: Client) -> None:
    assert client.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert client.get("/version").headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("unfit", ["two words", "x" * 129, "", "bell\x07", b"caf\xe9", "a\tb"])
def test_a_request_id_unfit_for_logs_is_refused(client: Client, unfit: str | bytes) -> None:
    response = client.get("/version", headers={"x-request-id": unfit})
    assert response.status_code == 400 and response.json()["error"]["param"] == "x-request-id"
    assert response.headers.get_list("x-request-id")[0].startswith("req-")
    both = [("x-request-id", "one"), ("x-request-id", "two")]
    assert client.get("/version", headers=both).status_code == 400


def test_where_the_server_names_answers_the_api_does_not(service: ApiService) -> None:
    inside = Client(httpx.ASGITransport(create_app(replace(service, is_named_outside=True))))
    for path in ("/version", "/nope"):
        assert "x-request-id" not in inside.get(path, headers={"x-request-id": "mine"}).headers


@pytest.mark.parametrize(
    "method, path, status", [("GET", "/nope", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)]
)
def test_wrong_paths_and_methods_are_openai_errors(client: Client, method: str, path: str, status: int) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("/chat/completions", "POST /v1/chat/completions"),
        ("/v1/v1/chat/completions", "POST /v1/chat/completions"),
        ("/v1/chat/completion", "POST /v1/chat/completions"),
        ("/v1//completions", "POST /v1/completions"),
        ("/openai/v1/models", "GET /v1/models"),
        ("/v1/message", "POST /v1/messages"),
        ("/helth", "GET /health"),
        ("/v1/responses/r/input", "GET /v1/responses/{response_id}/input_items"),
    ],
)
def test_an_unknown_path_s_error_names_the_one_that_was_meant(client: Client, asked: str, meant: str) -> None:
    answer = client.post(asked, {})
    assert answer.status_code == 404
    assert meant in answer.text and asked in answer.text


@pytest.mark.parametrize("asked", ["/", "/wp-admin.php", "/" + "completions" * 3000])
def test_no_path_is_suggested_where_none_is_similar(client: Client, asked: str) -> None:
    message = client.get(asked).json()["error"]["message"]
    assert "did you mean" not in message and len(message) < 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "OPTIONS, POST"),
        ("PUT", "/v1/models/demo", "DELETE, GET, HEAD, OPTIONS"),
        ("POST", "/v1/models/demo", "DELETE, GET, HEAD, OPTIONS"),
        ("PUT", "/v1/models/Org/Name/load", "OPTIONS, POST"),
        ("GET", "/v1/models/demo/load", "OPTIONS, POST"),
        ("DELETE", "/v1/models/Org/Name/load", "OPTIONS, POST"),
        ("PATCH", "/v1/responses/resp_1", "DELETE, GET, HEAD, OPTIONS"),
        ("PUT", "/ping", "GET, HEAD, OPTIONS, POST"),
    ],
)
def test_a_wrong_method_s_error_names_the_right_ones(client: Client, method: str, path: str, allowed: str) -> None:
    answer = client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert allowed.replace(", ", " or ") in answer.json()["error"]["message"]


def test_options_are_the_methods_of_a_path(client: Client) -> None:
    answer = client.request("OPTIONS", "/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"], answer.content) == (204, "OPTIONS, POST", b"")
    assert client.request("OPTIONS", "/nope").status_code == 404


def test_a_refused_preflight_request_names_the_setting(client: Client) -> None:
    asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
    answer = client.request("OPTIONS", "/v1/chat/completions", headers=asks)
    assert answer.status_code == 403 and "ingresses.cors_origins" in answer.json()["error"]["message"]


def test_too_many_or_too_large_headers(client: Client) -> None:
    assert client.get("/version", headers={f"x-{i}": "1" for i in range(120)}).status_code == 431
    assert client.get("/version", headers={"x-large": "a" * 70_000}).status_code == 431


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_names_its_replica_and_on_request_the_reason(
    client: Client, engine: ScriptedEngine, stream: bool
) -> None:
    engine.cached = 7
    body = {"model": "demo", "prompt": "hello", "max_tokens": 3, "stream": stream}
    plain = client.post("/v1/completions", body)
    assert (plain.headers["x-raydix-replica"], plain.headers["x-raydix-cached-tokens"]) == ("replica-1", "7")
    assert "x-raydix-decision" not in plain.headers
    explained = client.post("/v1/completions", body, headers={"x-raydix-explain": "true"})
    decision = json.loads(explained.headers["x-raydix-decision"])
    assert decision["terms"] == {"replica-1": {"total": 0.25}}


def test_only_the_admin_sees_the_last_decisions(service: ApiService, client: Client) -> None:
    for number in range(3):
        client.post("/v1/completions", {"model": "demo", "prompt": f"number {number}"})
    assert client.get("/v1/router/decisions").status_code == 403  # no admin key is configured
    closed = replace(service, admin_key_hash=hashlib.sha256(b"root").hexdigest())
    admin = Client(httpx.ASGITransport(create_app(closed)))
    key = {"authorization": "Bearer root"}
    assert admin.get("/v1/router/decisions").status_code == 401
    assert len(admin.get("/v1/router/decisions", headers=key).json()["data"]) == 3
    (latest,) = admin.get("/v1/router/decisions?limit=1&model=demo", headers=key).json()["data"]
    assert latest["replica"] == "replica-1"
    for query, status in (("limit=0", 400), ("limit=x", 400), ("limit=99999999", 400), ("model=other", 404)):
        assert admin.get(f"/v1/router/decisions?{query}", headers=key).status_code == status


def test_a_defect_in_an_endpoint_that_generates_nothing_is_an_error_object_too(service: ApiService) -> None:
    async def defective() -> tuple[bytes, str]:
        raise RuntimeError("secret")

    client = Client(httpx.ASGITransport(create_app(replace(service, metrics_text=defective))))
    answer = client.get("/metrics", headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert "mine" in answer.json()["error"]["message"] and "secret" not in answer.text
