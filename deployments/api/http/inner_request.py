"""Requests that the API sends to itself, as if the client had sent them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.http.scopes import DEFERRABLE, send_for_bodies
from deployments.api.http.transport import ON_DISCONNECT

_COPIED = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path", "client", "server",
    DEFERRABLE,  # set for batches, not by clients
)  # fmt: skip


def inner_scope(scope: Scope, headers: Sequence[tuple[bytes, bytes]], request_id: str, **changes: Any) -> Scope:
    """Return the scope of a request like the client's, with other headers but the same request id."""
    copied = {name: scope[name] for name in _COPIED if name in scope}
    own = [(name, value) for name, value in headers if name != b"x-request-id"]
    return {
        **copied,
        "query_string": b"",
        "headers": [*own, (b"x-request-id", request_id.encode())],
        **changes,
    }


class InnerAnswer(Response):
    """Answers a request with the answer to another one, which has a body and is sent to `app`."""

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes) -> None:
        # Skip Response.__init__, which makes a response of its own.
        self._app, self._scope, self._body = app, scope, body
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the other request, and its answer to the client."""
        bodies, unread = send_for_bodies(scope, send), [self._body]
        if ON_DISCONNECT in scope:
            self._scope[ON_DISCONNECT] = scope[ON_DISCONNECT]

        async def receive_body() -> Message:
            return {"type": "http.request", "body": unread.pop()} if unread else await receive()

        async def send_on(message: Message) -> None:
            if message["type"] != "http.response.start":
                await bodies(message)
                return
            # Both requests have the same id, which the layers around this one add.
            message["headers"] = [header for header in message.get("headers", ()) if header[0] != b"x-request-id"]
            await send(message)

        await self._app(self._scope, receive_body, send_on)
