"""Keys, tenants and their limits as clients see them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.api import ApiService, create_app
from deployments.api.base.errors import ApiError
from deployments.api.http.access import AccessControl
from deployments.client.protocol import Overloaded
from deployments.config.args import AppArgs
from deployments.config.tenants import KeyRing, hash_key
from monitoring.metrics import Metrics
from tests.deployments.support.scripted_api import Client, ScriptedEngine
from tests.support.metric_values import snapshot_of

ASK: dict[str, Any] = {"model": "demo", "prompt": "hi", "max_tokens": 5}
Build = Callable[..., Client]


def bearer(key: str) -> dict[str, Any]:
    return {"headers": {"authorization": f"Bearer {key}"}}


def tenant(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "key_hashes": [hash_key(f"key-{name}")], **fields}


@pytest.fixture
def build(service: ApiService) -> Build:
    """A client of a service with these tenants; the admin's key is "root"."""

    def build(*tenants: dict[str, Any], admin: bool = True, protect_metrics: bool | None = None) -> Client:
        admin_hash = hash_key("root") if admin else None
        args = AppArgs.model_validate(
            {"tenants": tenants, "admin_key_hash": admin_hash, "protect_metrics": protect_metrics}
        )
        keys = KeyRing(args.tenants, admin_hash)
        access = AccessControl(
            keys, protects_metrics=args.protects_metrics, admin_key_hash=admin_hash, clock=lambda: 0.0
        )
        app = create_app(dataclasses.replace(service, access=access, admin_key_hash=admin_hash))
        return Client(httpx.ASGITransport(app))

    return build


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def counted(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    return dict(snapshot_of(metrics).values[name])


def test_without_tenants_the_service_is_open_whatever_clients_send(client: Client, engine: ScriptedEngine) -> None:
    for headers in ({}, {"authorization": "Bearer none"}, {"authorization": "Basic eDp5"}, {"authorization": ""}):
        response = client.post("/v1/completions", ASK, headers=headers)
        assert response.status_code == 200 and not any("ratelimit" in name for name in response.headers)
    assert {request.tenant for request in engine.requests} == {"anonymous"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/tokenize", "/openapi.json", "/nowhere", "/"])
@pytest.mark.parametrize(
    ("authorization", "says"),
    [
        (None, "has no API key"),
        (b"Bearer wrong-key", "not known"),
        (b"Basic key-a", "begin with Bearer"),
        (b"key-a", "begin with Bearer"),
        (b"Bearer", "no valid API key"),
        (b"Bearer  ", "no valid API key"),
        (b"Bearer key a", "no valid API key"),
        (b"Bearer k\xc3\xa9y-a", "no valid API key"),
        (b"Bearer key-a\x00", "no valid API key"),
        (b"Bearer " + b"x" * 5000, "no valid API key"),
    ],
)
def test_without_a_known_key_every_path_is_closed(
    build: Build, path: str, authorization: bytes | None, says: str
) -> None:
    headers = [] if authorization is None else [(b"authorization", authorization)]
    response = build(tenant("a")).get(path, headers=headers)
    error = error_of(response)
    assert (response.status_code, error["code"], error["type"]) == (
        401,
        "invalid_api_key",
        "invalid_request_error",
    )
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert says in error["message"] and "wrong-key" not in response.text and "key-a" not in response.text


def test_a_key_may_come_as_anthropics_clients_send_it(build: Build, engine: ScriptedEngine) -> None:
    client = build(tenant("a"), tenant("b"))
    for path in ("/v1/models", "/openapi.json"):
        assert client.get(path, headers={"x-api-key": "key-a"}).status_code == 200
    assert client.post("/v1/completions", ASK, headers={"x-api-key": "key-b"}).status_code == 200
    both = {"x-api-key": "key-a", "authorization": "Bearer key-b"}
    assert client.post("/v1/completions", ASK, headers=both).status_code == 200
    assert [request.tenant for request in engine.requests] == ["b", "b"]
    wrong: list[tuple[bytes, str]] = [(b"", "no valid"), (b"key a", "no valid"), (b"key-c", "not known")]
    for key, says in wrong:
        refused = client.get("/v1/models", headers=[(b"x-api-key", key)])
        assert refused.status_code == 401 and says in error_of(refused)["message"]
    twice = client.get("/v1/models", headers=[(b"x-api-key", b"key-a")] * 2)
    assert "several x-api-key" in error_of(twice)["message"]


def test_two_keys_in_one_request_and_huge_headers_are_refused(build: Build) -> None:
    client = build(tenant("a"))
    twice = [(b"authorization", b"Bearer key-a"), (b"authorization", b"Bearer key-b")]
    assert client.get("/v1/models", headers=twice).status_code == 401
    assert client.get("/v1/models", **bearer("x" * 70_000)).status_code == 431


@given(st.binary(max_size=40) | st.binary(max_size=20).map(lambda junk: b"Bearer " + junk))
@settings(max_examples=100, deadline=None)
def test_no_authorization_header_is_an_internal_error(header: bytes) -> None:
    args = AppArgs.model_validate({"tenants": [tenant("a")]})
    access = AccessControl(KeyRing(args.tenants))
    scope = {"type": "http", "path": "/v1/models", "headers": [(b"authorization", header)]}
    with pytest.raises(ApiError) as refused:
        access.identify(scope)
    assert refused.value.status == 401


def test_probes_need_no_key_and_metrics_need_the_admins_where_there_are_tenants(build: Build) -> None:
    closed = build(tenant("a"))
    assert [closed.get(path).status_code for path in ("/health", "/version", "/metrics")] == [200, 200, 401]
    assert closed.get("/metrics", **bearer("key-a")).status_code == 403
    assert closed.get("/metrics", **bearer("root")).status_code == 200
    for opened in (build(), build(tenant("a"), protect_metrics=False)):
        assert [opened.get(path).status_code for path in ("/health", "/version", "/metrics")] == [200, 200, 200]
    assert build(protect_metrics=True).get("/metrics").status_code == 401


def test_without_an_admin_key_the_metrics_of_tenants_are_refused_with_the_reason(build: Build) -> None:
    for key in ({}, bearer("key-a"), bearer("root")):
        refused = build(tenant("a"), admin=False).get("/metrics", **key)
        assert refused.status_code == 403
        assert "admin_key_hash" in error_of(refused)["message"] and "protect_metrics: false" in refused.text
    opened = build(tenant("a"), admin=False, protect_metrics=False)
    assert opened.get("/metrics").status_code == 200


def test_the_openai_client_sends_its_key_and_hears_of_a_wrong_one(build: Build) -> None:
    client = build(tenant("none"))

    async def ask(openai_client: openai.AsyncOpenAI, key: str) -> str:
        answer = await openai_client.with_options(api_key=key).completions.create(**ASK)
        return str(answer.choices[0].finish_reason)

    assert client.run(lambda c: ask(c, "key-none")) == "length"
    with pytest.raises(openai.AuthenticationError):
        client.run(lambda c: ask(c, "other"))


def test_a_key_decides_tenant_and_salt(build: Build, engine: ScriptedEngine) -> None:
    client = build(tenant("a", isolate_cache=False), tenant("b"))
    for key, salt in (("key-a", None), ("key-b", None), ("key-a", "tenant:b:"), ("key-b", "x")):
        assert client.post("/v1/completions", ASK | {"cache_salt": salt}, **bearer(key)).status_code == 200
    assert [(r.tenant, r.salt) for r in engine.requests] == [
        ("a", ""),
        ("b", "tenant:b:"),
        ("a", "salt:tenant:b:"),
        ("b", "tenant:b:x"),
    ]


def test_the_admins_key_opens_the_admins_doors_and_a_tenants_does_not(build: Build) -> None:
    """A model that cannot be switched answers the admin with 409."""
    tenants = build(tenant("a"))
    for client, key, status in (
        (tenants, "root", 409),
        (tenants, "key-a", 403),
        (tenants, "wrong", 401),
        (build(tenant("a"), admin=False), "key-a", 403),
        (build(), "root", 409),
        (build(), "wrong", 403),
    ):
        assert client.post("/v1/models/demo/load", **bearer(key)).status_code == status
    assert build().post("/v1/completions", ASK, headers={"authorization": "Bearer é".encode()}).status_code == 200


def test_limits_show_in_every_answer_and_end_in_429(build: Build, metrics: Metrics) -> None:
    client = build(tenant("a", requests_per_minute=2, tokens_per_minute=1000), tenant("b"))
    first = client.post("/v1/completions", ASK, **bearer("key-a"))
    assert (first.headers["x-ratelimit-limit-requests"], first.headers["x-ratelimit-remaining-requests"]) == (
        "2",
        "1",
    )
    used = first.json()["usage"]["total_tokens"]
    assert first.headers["x-ratelimit-remaining-tokens"] == str(1000 - used)
    client.post("/v1/completions", b"not json", **bearer("key-a"))  # counts as a request all the same
    refused = client.post("/v1/completions", ASK, **bearer("key-a"))
    error = error_of(refused)
    assert (refused.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert "2 requests per minute" in error["message"] and refused.headers["retry-after"] == "30"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert client.post("/v1/completions", ASK, **bearer("key-b")).status_code == 200
    assert counted(metrics, "tenant_rejections_total") == {("a", "requests_per_minute"): 1}
    assert counted(metrics, "tenant_requests_total") == {("a",): 1, ("b",): 1}
    tokens = counted(metrics, "tenant_tokens_total")
    assert tokens["a", "prompt"] + tokens["a", "generated"] == used


def test_a_refused_request_gives_its_tokens_back(build: Build, engine: ScriptedEngine) -> None:
    client = build(tenant("a", tokens_per_minute=100, max_concurrency=2))
    ask = ASK | {"prompt": "word " * 60, "n": 2}
    engine.refuse_with = Overloaded("no room", 3, "deadline")
    for _ in range(3):
        refused = client.post("/v1/completions", ask, **bearer("key-a"))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "3")
    engine.refuse_with = None
    assert client.post("/v1/completions", ask, **bearer("key-a")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_generations_count_against_concurrency_until_their_answer_ends(build: Build, stream: bool) -> None:
    client = build(tenant("a", max_concurrency=2))
    for _ in range(5):
        ask = ASK | {"n": 2, "stream": stream}
        assert client.post("/v1/completions", ask, **bearer("key-a")).status_code == 200
    too_many = client.post("/v1/completions", ASK | {"n": 3}, **bearer("key-a"))
    assert (too_many.status_code, error_of(too_many)["param"]) == (400, "n")
    for ask in ({"best_of": 3}, {"best_of": 3, "use_beam_search": True}):
        too_many = client.post("/v1/completions", ASK | ask, **bearer("key-a"))
        assert (too_many.status_code, error_of(too_many)["param"]) == (400, "best_of")


def test_a_second_request_waits_for_the_first_to_end_or_to_be_left(
    service: ApiService, engine: ScriptedEngine
) -> None:
    args = AppArgs.model_validate({"tenants": [tenant("a", max_concurrency=1)]})
    app = create_app(dataclasses.replace(service, access=AccessControl(KeyRing(args.tenants))))
    engine.hangs = True

    async def scenario() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            first = asyncio.create_task(client.post("/v1/completions", json=ASK, **bearer("key-a")))
            while not engine.generations:
                await asyncio.sleep(0)
            refused = await client.post("/v1/completions", json=ASK, **bearer("key-a"))
            assert refused.status_code == 429 and "1 generations at once" in refused.text
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            engine.hangs = False
            assert (await client.post("/v1/completions", json=ASK, **bearer("key-a"))).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_wait_must_be_a_number_of_seconds(client: Client, value: str) -> None:
    response = client.post("/v1/completions", ASK, headers={"x-max-wait-s": value})
    assert (response.status_code, error_of(response)["param"]) == (400, "x-max-wait-s")


def test_a_wait_reaches_the_engine_client(client: Client, engine: ScriptedEngine) -> None:
    client.post("/v1/completions", ASK, headers={"x-max-wait-s": "2.5"})
    assert engine.requests[0].max_wait_s == 2.5
