"""The ingress's HTTP server on a free port of this process, and clients that say what they like."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.private_ray import free_port
from deployments.config.limits import Limits
from deployments.config.settings import IngressSettings
from deployments.ingress.http_server import HttpServer

MAX_HEADER_BYTES = 2000


def limits(unread_s: float = 60.0, min_bytes_per_s: float = 0.0) -> Limits:
    return Limits(
        max_header_bytes=MAX_HEADER_BYTES,
        slow_reader_timeout_s=unread_s,
        slow_reader_min_bytes_per_s=min_bytes_per_s,
    )


class Api:
    """An ASGI application that answers with its body's length; to /held only once `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.num_open = self.num_requests = 0
        self.paths: list[str] = []
        self.headers: list[list[tuple[bytes, bytes]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_open += 1
        self.num_requests += 1
        self.paths.append(scope["path"])
        self.headers.append(scope["headers"])
        size, has_more = 0, True
        while has_more:
            message = await receive()
            size += len(message.get("body", b""))
            has_more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        if scope["path"] == "/held":
            await send({"type": "http.response.body", "body": b"begun,", "more_body": True})
            await self.go.wait()
        await send({"type": "http.response.body", "body": b"%d" % size})
        self.num_open -= 1


@asynccontextmanager
async def serving(api: Any, unread_s: float = 60.0, min_bytes_per_s: float = 0.0, **settings: Any) -> Any:
    """Serve on a free port; yields the port and the server, which is drained in the end."""
    asked = IngressSettings(port=free_port(), **settings)
    server = HttpServer(api, asked, limits(unread_s, min_bytes_per_s))
    server.start()
    try:
        yield asked.port, server
    finally:
        await server.drain()


async def said(port: int, *parts: bytes) -> bytes:
    """Send parts on one connection, and return all that the server says until it closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


def error_of(answer: bytes) -> tuple[int, str]:
    head, body = answer.split(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def run_on(loop: Callable[[], asyncio.AbstractEventLoop], scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario)
