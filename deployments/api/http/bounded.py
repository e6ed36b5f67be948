"""Refuses requests while too many are open, where no proxy before the API does. No tenant gets all places."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.errors import RETRY_AFTER_S, ApiError
from deployments.api.http.access import OPEN_PATHS, tenant_in
from deployments.api.http.error_response import error_response
from deployments.api.http.scopes import route_path


@dataclass(slots=True)
class OpenRequests:
    """How many requests are open, which outlives a change of the layers around them."""

    num_open: int = 0
    num_open_of: Counter[str] = field(default_factory=Counter)
    """By tenant."""


class Bounded:
    """The ASGI middleware that counts open requests. Only POST is refused: health and metrics always answer."""

    def __init__(
        self, app: ASGIApp, max_open: int, *, num_tenants: int = 0, counts: OpenRequests | None = None
    ) -> None:
        """Of several tenants, which are in the scope by now, each may have half of the places."""
        self._app, self._max_open = app, max_open
        self._max_each = max_open - max_open // 2 if num_tenants > 1 else max_open
        self._counts = counts or OpenRequests()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with a 429."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        tenant, counts = tenant_in(scope).name, self._counts
        is_full = counts.num_open >= self._max_open
        if (is_full or counts.num_open_of[tenant] >= self._max_each) and route_path(scope) not in OPEN_PATHS:
            whose = "The server has" if is_full else f"The tenant {tenant!r} has"
            limit = f"as many as it takes{'' if is_full else ' of one tenant'} (ingresses.max_ongoing)"
            message = (
                f"{whose} {counts.num_open if is_full else self._max_each} open requests, {limit}; retry later."
            )
            headers = {"retry-after": f"{RETRY_AFTER_S:.0f}"}
            refused = ApiError(429, message, code="too_many_open_requests", headers=headers)
            await error_response(refused, scope)(scope, receive, send)
            return
        counts.num_open += 1
        counts.num_open_of[tenant] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            counts.num_open -= 1
            counts.num_open_of[tenant] -= 1
