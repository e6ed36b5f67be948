"""Requests above the bound get a 429, and health still answers."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from deployments.api.http.access import AccessControl, Gate
from deployments.api.http.bounded import Bounded
from deployments.config.tenants import KeyRing, TenantSettings, hash_key


class Held:
    """An application whose answers wait for `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.num_open = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_open += 1
        if scope["method"] == "POST":
            await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def test_one_more_than_the_bound_is_refused_until_one_has_ended() -> None:
    async def scenario() -> None:
        held = Held()
        transport = httpx.ASGITransport(Bounded(held, max_open=2))
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            first = [asyncio.create_task(client.post("/")) for _ in range(2)]
            while held.num_open < 2:
                await asyncio.sleep(0)
            refused = await client.post("/")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
            assert refused.json()["error"]["code"] == "too_many_open_requests"
            assert (await client.get("/health")).status_code == 200
            held.go.set()
            assert [answer.status_code for answer in await asyncio.gather(*first)] == [200, 200]
            assert (await client.post("/")).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(("names", "places"), [(("a", "b"), 2), (("a",), 3)])
def test_of_several_tenants_each_may_have_half_of_the_places(names: tuple[str, ...], places: int) -> None:
    """And who has no key has none."""
    access = AccessControl(
        KeyRing([TenantSettings(name=name, key_hashes=(hash_key(f"key-of-{name}"),)) for name in names])
    )

    async def scenario() -> None:
        held = Held()
        transport = httpx.ASGITransport(Gate(Bounded(held, max_open=3, num_tenants=len(names)), access))
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:

            async def post(name: str) -> httpx.Response:
                return await client.post("/", headers={"authorization": f"Bearer key-of-{name}"})

            assert (await post("nobody")).status_code == 401
            first = [asyncio.create_task(post("a")) for _ in range(places)]
            while held.num_open < places:
                await asyncio.sleep(0)
            refused = await post("a")
            assert refused.status_code == 429 and "ingresses.max_ongoing" in refused.json()["error"]["message"]
            if len(names) > 1:
                first.append(asyncio.create_task(post("b")))
                while held.num_open < 3:
                    await asyncio.sleep(0)
                assert (await post("b")).status_code == 429
            held.go.set()
            assert {answer.status_code for answer in await asyncio.gather(*first)} == {200}
            assert (await post("a")).status_code == 200

    asyncio.run(scenario())
