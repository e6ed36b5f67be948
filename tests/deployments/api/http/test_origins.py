"""Which web pages may use the API: names that lead elsewhere, other sites, and what browsers ask beforehand."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.api import ApiService, create_app
from deployments.api.http.access import AccessControl
from deployments.config.args import AppArgs
from deployments.config.settings import IngressSettings
from deployments.config.tenants import KeyRing, hash_key
from tests.deployments.support.scripted_api import Client, ScriptedEngine

ASK: dict[str, Any] = {"model": "demo", "prompt": "hi", "max_tokens": 5}
APP = "https://app.example.com"
Build = Callable[..., Client]


@pytest.fixture
def build(service: ApiService) -> Build:
    """A client of a service whose ingresses have these settings."""

    def build(**settings: Any) -> Client:
        ingresses = IngressSettings(**settings)
        made = dataclasses.replace(
            service, allowed_hosts=ingresses.hosts, cors_origins=ingresses.cors_origins, is_named_outside=False
        )
        return Client(httpx.ASGITransport(create_app(made)))

    return build


def preflight(client: Client, origin: str, headers: str = "authorization,content-type") -> httpx.Response:
    """What a browser asks before a page of another site may send JSON."""
    asked = {"access-control-request-method": "POST", "access-control-request-headers": headers}
    return client.request("OPTIONS", "/v1/completions", headers={"origin": origin, **asked})


# --- Host -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "host", "is_let"),
    [
        ({}, "localhost", True),
        ({}, "LOCALHOST:8000", True),
        ({}, "raydix.localhost:8000", True),
        ({}, "127.0.0.1:8000", True),
        ({}, "127.8.8.8", True),
        ({}, "[::1]:8000", True),
        ({}, "localhost.", True),
        ({}, "evil.example.com:8000", False),
        ({}, "localhost.evil.example.com", False),
        ({}, "127.0.0.1.evil.example.com:8000", False),
        ({}, "10.0.0.7:8000", False),
        ({}, "[::2]", False),
        ({}, "]:", False),
        ({"host": "::1"}, "evil.example.com", False),
        ({"host": "localhost"}, "evil.example.com", False),
        ({"host": "0.0.0.0"}, "any.example.com", True),
        ({"host": "10.0.0.7"}, "any.example.com", True),
        ({"http": "serve"}, "any.example.com", True),  # Serve's proxy listens, at an address of its own
        ({"allowed_hosts": ["*"]}, "any.example.com", True),
        ({"allowed_hosts": ["api.example.com"]}, "api.example.com:443", True),
        ({"allowed_hosts": ["api.example.com"]}, "localhost", False),
        ({"allowed_hosts": ["*.example.com"]}, "a.b.example.com", True),
        ({"allowed_hosts": ["*.example.com"]}, "example.com", False),
        ({"allowed_hosts": ["10.0.0.0/8"]}, "10.1.2.3:8000", True),
        ({"allowed_hosts": [], "host": "0.0.0.0"}, "10.1.2.3:8000", False),
    ],
)
def test_a_request_names_the_server_by_one_of_its_hosts(
    build: Build, engine: ScriptedEngine, settings: dict[str, Any], host: str, is_let: bool
) -> None:
    client = build(**settings)
    for _ in range(2):  # a host that was found right is not looked at again
        response = client.post("/v1/completions", ASK, headers={"host": host})
        assert response.status_code == (200 if is_let else 421)
    if not is_let:
        error = response.json()["error"]
        assert error["code"] == "host_not_allowed" and "ingresses.allowed_hosts" in error["message"]
        assert response.headers["x-request-id"] and not engine.requests


def test_probes_without_a_host_are_answered(service: ApiService) -> None:
    """HTTP/1.0 has no Host header, and browsers always send one."""
    made = dataclasses.replace(service, allowed_hosts=("localhost",))

    async def without_host(scope: Any, receive: Any, send: Any) -> None:
        await create_app(made)({**scope, "headers": []}, receive, send)

    assert Client(httpx.ASGITransport(without_host)).get("/version").status_code == 200


@given(host=st.binary(max_size=40))
def test_no_host_header_is_an_internal_error(host: bytes) -> None:
    from deployments.api.http.origins import Origins
    from deployments.config.hosts import LOCAL_HOSTS

    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        statuses.append(200)

    async def receive() -> Any:
        raise AssertionError("a body is not read")

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {"type": "http", "method": "GET", "path": "/version", "headers": [(b"host", host)]}
    asyncio.run(Origins(app, LOCAL_HOSTS, ())(scope, receive, send))
    assert statuses in ([200], [421])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"allowed_hosts": ["http://api.example.com"]}, "without a scheme and a port"),
        ({"allowed_hosts": ["api.example.com:8000"]}, "without a scheme and a port"),
        ({"allowed_hosts": [""]}, "is not a host"),
        ({"allowed_hosts": ["a.*.com"]}, "is not a host"),
        ({"cors_origins": ["app.example.com"]}, "is not an origin"),
        ({"cors_origins": ["https://app.example.com/"]}, "without a path or a slash"),
        ({"cors_origins": ["https://App.example.com"]}, "as browsers do"),
        ({"cors_origins": ["null"]}, "is not an origin"),
    ],
)
def test_origins_that_no_browser_sends_are_refused_in_the_configuration(
    settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        AppArgs.model_validate({"ingresses": settings})


# --- Origin ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [APP, "*"])
def test_pages_of_a_declared_origin_may_ask_and_read(build: Build, declared: str) -> None:
    client = build(cors_origins=[declared, "http://localhost:3000"], allowed_hosts=["*"])
    asked = preflight(client, APP, "authorization,content-type,x-stainless-os")
    assert asked.status_code == 204 and asked.content == b""
    assert asked.headers["access-control-allow-origin"] == APP
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    for body in (ASK, ASK | {"stream": True}, {"model": "demo"}):  # answers, streams and errors can be read
        response = client.post("/v1/completions", body, headers={"origin": APP})
        assert response.headers["access-control-allow-origin"] == APP
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        assert "origin" in response.headers["vary"]


def test_pages_of_other_origins_are_told_nothing(build: Build) -> None:
    for client in (build(), build(cors_origins=["http://localhost:3000"])):
        here = {"host": "localhost:8000"}
        asked = client.request(
            "OPTIONS", "/v1/completions", headers={"origin": APP, "access-control-request-method": "POST", **here}
        )
        assert asked.status_code == 403 and "ingresses.cors_origins" in asked.json()["error"]["message"]
        answer = client.post("/v1/completions", ASK, headers={"origin": APP, **here})
        assert not [name for response in (asked, answer) for name in response.headers if "control-allow" in name]


def test_programs_see_no_difference(build: Build) -> None:
    client = build(cors_origins=[APP], allowed_hosts=["*"])
    response = client.post("/v1/completions", ASK)
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_browser_asks_without_a_key_and_its_page_needs_one(service: ApiService) -> None:
    args = AppArgs.model_validate({"tenants": [{"name": "a", "key_hashes": [hash_key("key-a")]}]})
    access = AccessControl(KeyRing(args.tenants))
    made = dataclasses.replace(service, access=access, cors_origins=(APP,))
    client = Client(httpx.ASGITransport(create_app(made)))
    assert preflight(client, APP).status_code == 204
    refused = client.post("/v1/completions", ASK, headers={"origin": APP})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, APP)
    right = {"origin": APP, "authorization": "Bearer key-a"}
    assert client.post("/v1/completions", ASK, headers=right).status_code == 200
