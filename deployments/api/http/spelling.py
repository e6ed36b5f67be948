"""Normalizes requests: a HEAD is a GET without its body, and a last slash is ignored."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.http.scopes import forget_send, note_send


class Spelling:
    """The outermost ASGI middleware, so that all others see one spelling of a path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http":
            is_head, path = scope["method"] == "HEAD", scope["path"]
            if is_head or path.endswith("/"):
                scope = {**scope, "method": "GET" if is_head else scope["method"], "path": path.rstrip("/") or "/"}
            if is_head:
                send = _without_body(send)
            note_send(scope, send)
        try:
            await self._app(scope, receive, send)
        finally:
            forget_send(scope)


def _without_body(send: Send) -> Send:
    """Return a `send` that keeps the headers, content-length among them, and drops the body."""

    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_head
