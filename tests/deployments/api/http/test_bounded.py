"""Requests above the bound get a 429, and health still answers."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from deployments.api.http.bounded import Bounded


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
