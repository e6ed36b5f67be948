"""Sends requests to the API within its own process: checked, limited, counted and logged like any other.

They give way to all requests of clients, because no client waits for a single one of them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message

from deployments.api.http.access import as_tenant
from deployments.api.http.scopes import NO_READER, as_deferrable, request_id
from deployments.batch.runner import IGNORED_FIELDS, Reply
from deployments.config.tenants import Tenant


class InProcessApi:
    """An API for one tenant, which has shown its key, or needs none."""

    def __init__(self, app: ASGIApp, tenant: Tenant) -> None:
        self._app, self._tenant = app, tenant

    async def post(self, url: str, body: bytes) -> Reply:
        """Send one request. Cancelling this aborts it, as a client does that disconnects."""
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            if unread:
                return unread.pop()
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # no disconnect

        async def send(message: Message) -> None:
            sent.append(message)

        scope = as_deferrable(as_tenant(_scope(url), self._tenant))
        await self._app(scope, receive, send)
        start, *rest = sent
        content = b"".join(message.get("body", b"") for message in rest)
        headers = dict(start["headers"])
        wait = headers.get(b"retry-after")
        return Reply(
            start["status"],
            content,
            request_id(scope),
            retry_after_s=None if wait is None else float(wait),
            is_final=headers.get(b"x-should-retry") == b"false",
            ignored_fields=headers.get(IGNORED_FIELDS.encode(), b"").decode("ascii"),
        )


def _scope(url: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        NO_READER: True,
    }
