"""The update that docs/upgrade.md shows, under traffic: every replica is replaced, and no client notices.

Then a second ingress is added, as the page says it can be, and a tenant's limit is divided by two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest
import yaml
from ray import serve
from ray.serve._private.api import _get_global_client
from ray.serve.schema import ServeDeploySchema

from benchmarks.private_ray import free_port
from deployments.config.tenants import hash_key
from tests.docs.support.markdown_pages import ROOT, read_page
from tests.e2e.conftest import Service

pytestmark = pytest.mark.e2e

PER_MINUTE = 60_000
KEY = {"authorization": "Bearer key-t"}


@pytest.fixture
def config() -> dict[str, Any]:
    """The page's config with one engine replica instead of two, for an application beside the session's."""
    blocks = read_page(ROOT / "docs/upgrade.md").blocks
    [text] = [block.text for block in blocks if "surge_percent" in block.text]
    document: dict[str, Any] = yaml.safe_load(text)
    document["applications"][0] |= {"name": "upgraded", "route_prefix": "/upgraded"}
    args = document["applications"][0]["args"]
    args["ingresses"]["port"] = free_port()
    [engines] = [each for each in document["applications"][0]["deployments"] if each["name"] == "EngineReplica"]
    engines["num_replicas"] = 1
    args["tenants"] = [{"name": "t", "key_hashes": [hash_key("key-t")], "requests_per_minute": PER_MINUTE}]
    args["protect_metrics"] = False
    return document


@pytest.fixture
def upgraded(service: Service, config: dict[str, Any]) -> Iterator[Service]:
    """The application of `config`, running."""
    deploy(config)
    running = Service(f"http://127.0.0.1:{config['applications'][0]['args']['ingresses']['port']}")
    running.wait_until(lambda: running.health().get("status") == "healthy", timeout=300)
    yield running
    serve.delete("upgraded")


def deploy(config: dict[str, Any]) -> None:
    """Deploy a config as `serve deploy` does, through Serve's controller."""
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)


async def stream(client: httpx.AsyncClient) -> None:
    """One stream to its end; fails when it is refused or breaks off."""
    body = {"model": "demo", "prompt": "A story", "max_tokens": 200, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]", lines[-1]
    assert not [line for line in lines if line.startswith('data: {"error"')]


def test_all_replicas_are_replaced_and_no_stream_is_dropped(upgraded: Service, config: dict[str, Any]) -> None:
    before = set(upgraded.replicas())
    changed = deepcopy(config)
    changed["applications"][0]["args"]["engine"]["max_running"] = 32

    def is_replaced() -> bool:
        health = upgraded.health()
        names = {state["replica"] for state in health["replicas"]}
        return health["replicas_up"] == 1 and not names & before

    async def scenario() -> None:
        is_over = asyncio.Event()
        num_done = 0

        async def user(client: httpx.AsyncClient) -> None:
            nonlocal num_done
            while not is_over.is_set():
                await stream(client)
                num_done += 1

        async with httpx.AsyncClient(base_url=upgraded.url, timeout=120, headers=KEY) as client:
            users = [asyncio.create_task(user(client)) for _ in range(4)]
            deploy(changed)
            try:
                await asyncio.to_thread(upgraded.wait_until, is_replaced, 300)
            finally:
                is_over.set()
            await asyncio.gather(*users)
            assert num_done >= len(users)

    asyncio.run(scenario())
    assert upgraded.metric("raydix_migrations_total") == 0  # they ended where they began
    [ingress] = [each for each in changed["applications"][0]["deployments"] if each["name"] == "Ingress"]
    ingress["num_replicas"] = 2
    upgraded.wait_until(lambda: allowed_by_one(upgraded) == PER_MINUTE, 300)  # the old ingress has gone
    deploy(changed)
    upgraded.wait_until(lambda: allowed_by_one(upgraded) == PER_MINUTE / 2, 300)


def allowed_by_one(service: Service) -> float:
    """The requests per minute that one ingress allows the tenant."""
    body = {"model": "demo", "prompt": "Return the", "max_tokens": 1}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, headers=KEY, timeout=60)
    return float(answer.headers["x-ratelimit-limit-requests"])
