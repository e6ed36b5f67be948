"""Refuses requests while too many are open, where no proxy before the API does. No tenant gets all places."""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.errors import RETRY_AFTER_S, ApiError
from deployments.api.http.access import OPEN_PATHS, tenant_in
from deployments.api.http.error_response import error_response
from deployments.api.http.scopes import is_deferrable, route_path


class Bounded:
    """The ASGI middleware that counts open requests. Only POST is refused: health and metrics always answer.

    Requests of batches, which have bounds of their own, take no places of clients.
    """

    def __init__(self, app: ASGIApp, max_open: int, *, num_tenants: int = 0) -> None:
        """Of several tenants, which are in the scope by now, each may have half of the places."""
        self._app, self._max_open = app, max_open
        self._max_each = max_open - max_open // 2 if num_tenants > 1 else max_open
        self._num_open = 0
        self._open_of: Counter[str] = Counter()  # by tenant, where there are several

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with a 429."""
        if scope["type"] != "http" or scope["method"] != "POST" or is_deferrable(scope):
            await self._app(scope, receive, send)
            return
        tenant = tenant_in(scope).name
        is_full = self._num_open >= self._max_open
        if (is_full or self._open_of[tenant] >= self._max_each) and route_path(scope) not in OPEN_PATHS:
            whose = "The server has" if is_full else f"The tenant {tenant!r} has"
            limit = f"as many as it takes{'' if is_full else ' of one tenant'} (ingresses.max_ongoing)"
            message = (
                f"{whose} {self._num_open if is_full else self._max_each} open requests, {limit}; retry later."
            )
            headers = {"retry-after": f"{RETRY_AFTER_S:.0f}"}
            refused = ApiError(429, message, code="too_many_open_requests", headers=headers)
            await error_response(refused, scope)(scope, receive, send)
            return
        self._num_open += 1
        self._open_of[tenant] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open -= 1
            self._open_of[tenant] -= 1
