"""On the paths of Anthropic's API every layer answers errors in Anthropic's form, with the request's id."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.api import ApiService, create_app
from deployments.api.http.access import AccessControl
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from tests.deployments.support.scripted_api import Client

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
    check(client.get(f"{root}{MESSAGES}/batches"), 404, "not_found_error", "docs/api.md")


def test_other_paths_keep_the_form_of_openai(client: Client) -> None:
    for path in ("/v1/messages2", "/v1", "/v1/chat/messages"):
        response = client.get(path)
        assert response.status_code == 404 and "param" in response.json()["error"]
        assert "request-id" not in response.headers
