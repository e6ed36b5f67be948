"""What tools for vLLM and SGLang ask a server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from deployments.api import ApiService, create_app
from deployments.api.http.access import AccessControl
from deployments.client.protocol import Unavailable
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from tests.deployments.support.api_over_engines import ADMIN_KEY, api_over
from tests.deployments.support.in_process_engines import until
from tests.deployments.support.scripted_api import Client, ScriptedEngine

ROOT = {"authorization": "Bearer root"}
ACME = TenantSettings(name="acme", key_hashes=(hash_key("acme"),))


def client_of(service: ApiService) -> Client:
    return Client(httpx.ASGITransport(create_app(service)))


@pytest.fixture
def closed(service: ApiService) -> Client:
    """A service with a tenant and an admin key."""
    access = AccessControl(KeyRing([ACME], hash_key("root")))
    shown = {"router": {"policy": "cost"}}
    return client_of(replace(service, access=access, admin_key_hash=hash_key("root"), settings=shown))


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
@pytest.mark.parametrize("state, status", [("healthy", 200), ("degraded", 200), ("unhealthy", 503)])
def test_a_ping_is_the_health_without_a_body(
    closed: Client, engine: ScriptedEngine, method: str, state: str, status: int
) -> None:
    engine.state = state
    answer = closed.request(method, "/ping")
    assert (answer.status_code, answer.content) == (status, b"")


def test_a_ping_is_answered_while_the_ingress_is_full(service: ApiService) -> None:
    full = client_of(replace(service, max_open=0))
    assert full.post("/v1/completions", {"model": "demo", "prompt": "a"}).status_code == 429
    assert full.post("/ping").status_code == 200


def test_the_load_is_the_number_of_open_generations() -> None:
    async def scenario() -> None:
        async with api_over() as api:
            runner = api.engines.runners[0]
            runner.gate.clear()
            answers = [asyncio.create_task(api.complete()) for _ in range(3)]
            await until(lambda: api.client.num_streams == 3)
            assert (await api.http.get("/load")).json() == {"server_load": 3}
            runner.gate.set()
            await asyncio.gather(*answers)
            assert (await api.http.get("/load")).json() == {"server_load": 0}

    asyncio.run(scenario())


def test_the_server_s_info_has_version_models_and_settings(closed: Client, service: ApiService) -> None:
    info = closed.get("/server_info", headers=ROOT).json()
    assert info["version"] == service.version
    assert [model["id"] for model in info["models"]] == ["demo"]
    assert info["settings"] == {"router": {"policy": "cost"}}


def test_where_there_is_an_admin_key_the_server_s_info_needs_it(closed: Client, client: Client) -> None:
    assert closed.get("/server_info").status_code == 401
    assert closed.get("/server_info", headers={"authorization": "Bearer acme"}).status_code == 403
    assert client.get("/server_info").status_code == 200  # there is none


def test_only_the_admin_empties_caches(closed: Client, client: Client) -> None:
    assert closed.post("/reset_prefix_cache", headers={"authorization": "Bearer acme"}).status_code == 403
    off = client.post("/reset_prefix_cache")
    assert off.status_code == 403 and "admin_key_hash" in off.json()["error"]["message"]
    assert closed.post("/reset_prefix_cache?model=other", headers=ROOT).status_code == 404


def test_a_replica_that_does_not_empty_its_cache_is_reported(service: ApiService) -> None:
    async def fail() -> dict[str, int]:
        raise Unavailable("1 of 2 replicas of demo did not empty their caches")

    served = replace(service.models["demo"], empty_caches=fail)
    broken = client_of(replace(service, models={"demo": served}, admin_key_hash=hash_key("root")))
    answer = broken.post("/reset_prefix_cache", headers=ROOT)
    assert answer.status_code == 503 and "1 of 2 replicas" in answer.json()["error"]["message"]


def test_emptied_caches_hold_nothing_the_router_knows_it_and_a_running_stream_continues() -> None:
    async def scenario() -> None:
        async with api_over(2, tenants=[ACME], block_tokens=4) as api:
            key = {"authorization": "Bearer acme"}
            used = iter(["r0", "r1", "r0", "r0", "r1"])
            api.engines.choose = lambda names: next(used)
            for _ in range(2):  # one at each replica
                assert (await api.complete(key)).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            totals = api.client.placer.totals
            await until(lambda: totals()["blocks"] > 0)
            runner = api.engines.runners[0]
            runner.gate.clear()
            running = asyncio.create_task(api.complete(key, max_tokens=40))
            await until(lambda: api.client.num_streams == 1)
            asked = asyncio.create_task(
                api.http.post("/reset_prefix_cache", headers={"authorization": f"Bearer {ADMIN_KEY}"})
            )
            runner.gate.set()
            (emptied,) = (await asked).json()["data"]
            assert emptied["id"] == "m" and emptied["freed_pages"]["r1"] > 0
            answer = (await running).json()
            assert answer["usage"]["completion_tokens"] == 40
            await api.http.post("/reset_prefix_cache?model=m", headers={"authorization": f"Bearer {ADMIN_KEY}"})
            await until(lambda: totals()["blocks"] == 0)
            for _ in range(2):
                cached = (await api.complete(key)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == 0, json.dumps(answer)

    asyncio.run(scenario())
