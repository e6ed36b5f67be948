"""Refuses requests while too many are open, where no proxy before the API does."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.errors import RETRY_AFTER_S, ApiError
from deployments.api.http.access import OPEN_PATHS
from deployments.api.http.error_response import error_response
from deployments.api.http.scopes import route_path


class Bounded:
    """The ASGI middleware that counts open requests. Only POST is refused: health and metrics always answer."""

    def __init__(self, app: ASGIApp, max_open: int) -> None:
        self._app, self._max_open = app, max_open
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with a 429."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._num_open >= self._max_open and route_path(scope) not in OPEN_PATHS:
            limit = "as many as it takes (ingresses.max_ongoing)"
            message = f"The server has {self._num_open} open requests, {limit}; retry later."
            headers = {"retry-after": f"{RETRY_AFTER_S:.0f}"}
            refused = ApiError(429, message, code="too_many_open_requests", headers=headers)
            await error_response(refused, scope)(scope, receive, send)
            return
        self._num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open -= 1
