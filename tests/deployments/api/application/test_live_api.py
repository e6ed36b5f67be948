"""New settings hold for the requests that come after them; those under way end as they began."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.api import ApiService, Limits
from deployments.api.application.live_api import LiveApi
from deployments.api.http.access import AccessControl
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from tests.deployments.support.scripted_api import ScriptedEngine

ASK: dict[str, Any] = {"model": "demo", "prompt": "hi", "max_tokens": 5}
Post = Callable[..., Awaitable[httpx.Response]]


def run(service: ApiService, scenario: Callable[[LiveApi, httpx.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        api = LiveApi(service)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://localhost") as client:
            await scenario(api, client)

    asyncio.run(main())


def changed(api: LiveApi, **limits: Any) -> ApiService:
    return replace(api.service, limits=Limits(**limits))


@pytest.mark.parametrize(
    ("limits", "body", "status"),
    [
        ({"max_choices": 2}, {**ASK, "n": 3}, 400),
        ({"max_body_bytes": 1024}, {**ASK, "user": "a" * 2000}, 413),
        ({"max_json_depth": 8}, {**ASK, "metadata": [[[[[[[[[[]]]]]]]]]]}, 400),
        ({"max_headers": 10}, ASK, 431),
        ({"unknown_fields": "refuse"}, {**ASK, "colour": "red"}, 400),
        ({"max_total_body_bytes": 4096, "max_body_bytes": 1024}, ASK, 200),
    ],
)
def test_each_layer_has_the_new_limits(
    service: ApiService, limits: dict[str, Any], body: dict[str, Any], status: int
) -> None:
    headers = {f"x-{number}": "a" for number in range(20)} if "max_headers" in limits else {}

    async def scenario(api: LiveApi, client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        await api.take_over(changed(api, **limits))
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == status
        await api.take_over(replace(api.service, limits=Limits()))
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200

    run(service, scenario)


def test_the_document_states_the_new_limits(service: ApiService) -> None:
    async def scenario(api: LiveApi, client: httpx.AsyncClient) -> None:
        before = (await client.get("/openapi.json")).text
        await api.take_over(changed(api, max_choices=77))
        assert '"maximum":77' in (await client.get("/openapi.json")).text.replace(" ", "")
        assert '"maximum":77' not in before.replace(" ", "")

    run(service, scenario)


def test_a_stream_ends_within_the_limits_that_it_began_with(service: ApiService, engine: ScriptedEngine) -> None:
    """The new limit on the silence between two events would end it."""
    engine.hangs = True

    async def scenario(api: LiveApi, client: httpx.AsyncClient) -> None:
        begun = asyncio.create_task(client.post("/v1/completions", json=ASK))
        while not engine.requests:
            await asyncio.sleep(0)
        await api.take_over(changed(api, idle_timeout_s=0.001, request_timeout_s=0.001))
        late = await client.post("/v1/completions", json=ASK)
        assert late.status_code in (408, 504), late.text
        assert not begun.done()
        begun.cancel()

    run(service, scenario)


def test_open_requests_of_before_count_against_the_places(service: ApiService, engine: ScriptedEngine) -> None:
    engine.hangs = True

    async def scenario(api: LiveApi, client: httpx.AsyncClient) -> None:
        begun = asyncio.create_task(client.post("/v1/completions", json=ASK))
        while not engine.requests:
            await asyncio.sleep(0)
        await api.take_over(changed(api, max_choices=3))
        full = await client.post("/v1/completions", json=ASK)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "too_many_open_requests")
        begun.cancel()

    run(replace(service, max_open=1), scenario)


def keys(*tenants: TenantSettings) -> KeyRing:
    return KeyRing(tenants)


def settings(name: str, key: str, **limits: Any) -> TenantSettings:
    return TenantSettings(name=name, key_hashes=(hash_key(key),), **limits)


def test_keys_and_tenants_change_for_the_next_request(service: ApiService) -> None:
    access = AccessControl(keys(settings("a", "old")))

    async def scenario(api: LiveApi, client: httpx.AsyncClient) -> None:
        async def status(key: str | None) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return (await client.post("/v1/completions", json=ASK, headers=headers)).status_code

        assert [await status(key) for key in ("old", "new", None)] == [200, 401, 401]
        access.take_over(keys(settings("a", "new")), protects_metrics=False, admin_key_hash=None)
        assert [await status(key) for key in ("old", "new", None)] == [401, 200, 401]
        access.take_over(keys(), protects_metrics=False, admin_key_hash=None)
        assert [await status(key) for key in ("old", "new", None)] == [200, 200, 200]

    run(replace(service, access=access), scenario)
