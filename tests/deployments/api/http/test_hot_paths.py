"""What a framework answers is made when the first such request comes, and once."""

from __future__ import annotations

import asyncio

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from deployments.api.http.hot_paths import HotPaths


def test_the_rest_is_made_for_the_first_request_that_is_not_hot() -> None:
    num_made = 0

    def make_rest() -> ASGIApp:
        nonlocal num_made
        num_made += 1
        return Response("rest")

    async def endpoint(request: Request) -> Response:
        return Response("hot")

    async def scenario() -> None:
        transport = httpx.ASGITransport(HotPaths(make_rest, {"/hot": endpoint}))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.post("/hot")).text == "hot" and num_made == 0
            for answer in (await client.get("/hot"), await client.post("/other"), await client.get("/other")):
                assert answer.text == "rest" and num_made == 1
            assert (await client.post("/hot")).text == "hot"
        HotPaths(make_rest, {}).make()
        assert num_made == 2

    asyncio.run(scenario())
