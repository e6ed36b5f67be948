"""HTTP requests as numbers: how many, on which route, with which status, and how many are being answered."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from monitoring.metrics import Metrics

_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
_CLIENT_GONE = 499
"""In place of a status: the client left before there was one."""


class HttpMetrics:
    """The outermost layer. Labels are our own words: a client can make no series by what it sends."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._num_inflight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and count it when its answer is over."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_GONE

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._count_inflight(1)
        try:
            await self._app(scope, receive, watched)
        finally:
            self._count_inflight(-1)
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.inc("http_requests_total", route=_template(scope), method=method, status=str(status))

    def _count_inflight(self, change: int) -> None:
        self._num_inflight += change
        self._metrics.set("http_inflight_requests", self._num_inflight)


def _template(scope: Scope) -> str:
    """The route that took the request, "/v1/models/{name}" for instance; "other" when it came to none."""
    return str(getattr(scope.get("route"), "path", "other"))
