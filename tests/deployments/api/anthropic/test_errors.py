"""On the paths of Anthropic's API every layer answers errors in Anthropic's form, with the request's id."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.api import ApiService, Limits, create_app
from deployments.api.http.access import AccessControl
from deployments.client.protocol import EndsEngines, Overloaded, Rejected, Unavailable
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from tests.deployments.support.scripted_api import Client, ScriptedEngine

MESSAGES = "/v1/messages"
ASKED = {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


def client_of(service: ApiService, **changes: Any) -> Client:
    return Client(httpx.ASGITransport(create_app(replace(service, **changes))))


def check(response: httpx.Response, status: int, kind: str, *words: str) -> None:
    """Assert that a response is an error of Anthropic's form."""
    body = response.json()
    assert response.status_code == status, body
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"} and body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert all(word in body["error"]["message"] for word in words), body


def test_the_gate(service: ApiService) -> None:
    keys = KeyRing([TenantSettings(name="a", key_hashes=(hash_key("key-of-a"),))])
    client = client_of(service, access=AccessControl(keys))
    check(client.post(MESSAGES, ASKED), 401, "authentication_error", "no API key")
    check(client.post(MESSAGES + "/count_tokens", ASKED), 401, "authentication_error", "no API key")
    assert client.post("/v1/chat/completions", ASKED).json()["error"]["code"] == "invalid_api_key"


def test_the_bound_on_open_requests(service: ApiService) -> None:
    response = client_of(service, max_open=0).post(MESSAGES, ASKED)
    check(response, 429, "rate_limit_error", "ingresses.max_ongoing")
    assert response.headers["retry-after"]


def test_the_check_of_hosts_and_origins(service: ApiService) -> None:
    client = client_of(service, allowed_hosts=("elsewhere",))
    check(client.post(MESSAGES, ASKED), 421, "invalid_request_error", "ingresses.allowed_hosts")
    asked = {"origin": "http://site", "access-control-request-method": "POST"}
    client = client_of(service, cors_origins=("http://other",))
    check(client.request("OPTIONS", MESSAGES, headers=asked), 403, "permission_error", "ingresses.cors_origins")


def test_the_bound_on_headers_and_the_check_of_ids(client: Client) -> None:
    large = {"x-large": "x" * 100_000}
    check(client.post(MESSAGES, ASKED, headers=large), 431, "invalid_request_error", "limits.max_header_bytes")
    wrong = {"x-request-id": "two words"}
    check(client.post(MESSAGES, ASKED, headers=wrong), 400, "invalid_request_error", "x-request-id")


@pytest.mark.parametrize("root", ["", "/route"])
def test_paths_that_do_not_exist(service: ApiService, root: str) -> None:
    client = Client(httpx.ASGITransport(create_app(service), root_path=root))
    check(client.get(f"{root}{MESSAGES}/batches"), 404, "not_found_error", "count_tokens", "/docs")


def test_methods_that_are_not_allowed(client: Client) -> None:
    check(client.get(MESSAGES), 405, "invalid_request_error", "GET")


def test_bodies_that_are_not_taken(service: ApiService) -> None:
    client = client_of(service, limits=Limits(max_body_bytes=1024))
    large = ASKED | {"system": "word " * 1000}
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        check(client.post(path, large), 413, "request_too_large", "limits.max_body_bytes")
        check(client.post(path, b"{"), 400, "invalid_request_error", "JSON")
        check(client.post(path, ASKED | {"model": "x"}), 404, "not_found_error", "'x'", "'demo'")
        form = {"content-type": "text/plain"}
        check(client.post(path, b"{}", headers=form), 415, "invalid_request_error", "application/json")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (Rejected("It can never fit."), 400, "invalid_request_error"),
        (Overloaded("all queues are full", 3), 429, "rate_limit_error"),
        (Overloaded("it would wait too long", 3, "deadline"), 503, "overloaded_error"),
        (Unavailable("no engine is up"), 503, "overloaded_error"),
        (EndsEngines(2), 500, "api_error"),
        (RuntimeError("a defect"), 500, "api_error"),
    ],
)
def test_errors_of_engines_have_anthropics_form(
    service: ApiService, engine: ScriptedEngine, failure: Exception, status: int, kind: str, stream: bool
) -> None:
    engine.refuse_with = failure
    transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
    response = Client(transport).post(MESSAGES, ASKED | {"stream": stream})
    check(response, status, kind)
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert "a defect" not in response.text


def test_the_limits_of_a_tenant(service: ApiService) -> None:
    tenant = TenantSettings(name="a", key_hashes=(hash_key("key-of-a"),), requests_per_minute=1)
    client = client_of(service, access=AccessControl(KeyRing([tenant])))
    key = {"x-api-key": "key-of-a"}
    assert client.post(MESSAGES, ASKED, headers=key).status_code == 200
    refused = client.post(MESSAGES, ASKED, headers=key)
    check(refused, 429, "rate_limit_error", "requests_per_minute")
    assert refused.headers["retry-after"]
    assert client.post(f"{MESSAGES}/count_tokens", ASKED, headers=key).status_code == 200


def test_other_paths_keep_the_form_of_openai(client: Client) -> None:
    for path in ("/v1/messages2", "/v1", "/v1/chat/messages"):
        response = client.get(path)
        assert response.status_code == 404 and "param" in response.json()["error"]
        assert "request-id" not in response.headers
