"""An API on a free port, whose connections break off after a few events each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.deployments.support.served_api import serving


@dataclass
class Breaking:
    """An ASGI application that ends each stream after `num_events` events, in the middle of the next one."""

    app: ASGIApp
    num_events: int = 1
    refusals: list[int] = field(default_factory=list)
    """Statuses with which the next streams are refused."""
    before_second: Callable[[], object] = lambda: None
    """Called before each stream but the first."""
    asked: list[str] = field(default_factory=list)
    """The methods of all requests, with their paths."""
    last_ids: list[str | None] = field(default_factory=list)
    """The Last-Event-ID of each stream that was asked for."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.asked.append(f"{scope['method']} {scope['path']}")
        if scope["method"] == "POST":
            self.last_ids.append(headers.get("last-event-id"))
            if len(self.last_ids) > 1:
                self.before_second()
                if self.refusals:
                    start = {"type": "http.response.start", "status": self.refusals.pop(0), "headers": []}
                    await send(start)
                    return await send({"type": "http.response.body", "body": b"the service is away"})
        left, is_stream = self.num_events, False

        async def send_part(message: Message) -> None:
            nonlocal left, is_stream
            if message["type"] == "http.response.start":
                is_stream = any(b"event-stream" in value for _, value in message["headers"])
            body = message.get("body", b"")
            num_events = body.count(b"\n\n")
            if not is_stream or num_events <= left:
                left -= num_events
                return await send(message)
            events = body.split(b"\n\n")
            whole, cut = events[:left], events[left]
            await send({**message, "body": b"\n\n".join([*whole, cut[: len(cut) // 2]]), "more_body": True})
            raise ConnectionResetError

        await self.app(scope, receive, send_part)


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an ASGI application from another thread, and yield its URL."""
    ended, began = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with serving(app) as (port, _):
            urls.append(f"http://127.0.0.1:{port}")
            began.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert began.wait(60)
        yield urls[0]
    finally:
        ended.set()
        thread.join()
