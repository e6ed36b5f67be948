"""A new ingress listens when it can answer, so that connections do not go to it while others could answer them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from benchmarks.private_ray import free_port
from deployments.config.limits import Limits
from deployments.config.settings import IngressSettings
from deployments.ingress.http_server import HttpServer
from deployments.ingress.opening import until_useful

NUM_CONNECTIONS = 32
"""Of which all go to one of two ingresses that listen once in 2**32 times."""


class Ingress:
    """An ingress of one model, whose engines come when the test says so."""

    def __init__(self, name: str, port: int, *, lacks_engines: bool) -> None:
        self.name, self.lacks_engines = name, lacks_engines
        self.server = HttpServer(self, IngressSettings(port=port), Limits())

    async def open(self, timeout_s: float = 3600.0) -> None:
        await until_useful(self.server, self._without_engines, timeout_s)
        self.server.start()

    async def _without_engines(self) -> list[str]:
        return ["demo"] if self.lacks_engines else []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status = 503 if self.lacks_engines else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": self.name.encode()})


async def answers(port: int) -> set[tuple[int, str]]:
    """Return who answers on connections of their own, and with which status."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        asked = [await client.get("/", headers={"connection": "close"}) for _ in range(NUM_CONNECTIONS)]
    return {(answer.status_code, answer.text) for answer in asked}


def test_while_another_ingress_can_answer_one_without_engines_gets_no_connections() -> None:
    async def scenario() -> None:
        port = free_port()
        old, new = Ingress("old", port, lacks_engines=False), Ingress("new", port, lacks_engines=True)
        await old.open()
        opening = asyncio.create_task(new.open())
        assert await answers(port) == {(200, "old")}
        assert not opening.done()
        new.lacks_engines = False
        await opening
        assert await answers(port) == {(200, "old"), (200, "new")}
        await asyncio.gather(old.server.drain(), new.server.drain())

    asyncio.run(scenario())


def test_the_first_ingress_immediately_reports_that_it_loads() -> None:
    async def scenario() -> None:
        port = free_port()
        first = Ingress("first", port, lacks_engines=True)
        await first.open()
        assert await answers(port) == {(503, "first")}
        await first.server.drain()

    asyncio.run(scenario())


def test_an_ingress_takes_over_when_the_last_other_one_ends_though_it_lacks_engines() -> None:
    async def scenario() -> None:
        port = free_port()
        old, new = Ingress("old", port, lacks_engines=False), Ingress("new", port, lacks_engines=True)
        await old.open()
        opening = asyncio.create_task(new.open())
        assert await answers(port) == {(200, "old")}
        await old.server.drain()
        await opening
        assert await answers(port) == {(503, "new")}
        await new.server.drain()

    asyncio.run(scenario())


def test_an_ingress_whose_engines_never_come_finally_listens_and_gives_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        port = free_port()
        old, new = Ingress("old", port, lacks_engines=False), Ingress("new", port, lacks_engines=True)
        await old.open()
        await new.open(timeout_s=0.0)
        assert (503, "new") in await answers(port)
        await asyncio.gather(old.server.drain(), new.server.drain())

    asyncio.run(scenario())
    assert "no engine of demo has answered" in caplog.text
