"""The outermost layer: counts every HTTP request, and keeps a record of each one that generates.

A record is opened when its request arrives and goes to the listeners (the request log, traces) when its answer has
been sent. Labels of metrics never contain text from a client, so a client cannot create series.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.base.errors import ApiError
from deployments.api.http.access import tenant_of
from deployments.api.http.scopes import is_own_probe, request_id, route_path
from deployments.api.record.request_metrics import Endpoint
from deployments.api.record.request_record import CLIENT_LEFT, Listener, RequestRecord
from monitoring.metrics import Counter, Metrics

logger = logging.getLogger(__name__)

ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/v1/score": "score",
    "/score": "score",
}
"""The endpoints that engines compute for, by path; their requests are recorded."""
_RECORD = "raydix.record"
_KEPT_HEADERS = (b"traceparent", b"tracestate")
_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})


def record_of(request: Request) -> RequestRecord:
    """Return the record that `Observation` opened for a request."""
    record: RequestRecord = request.scope[_RECORD]
    return record


def record_in(scope: Scope) -> RequestRecord | None:
    """Return the record of the request of this scope; None of one that does not generate."""
    found: RequestRecord | None = scope.get(_RECORD)
    return found


class Observation:
    """The ASGI middleware that counts and records requests."""

    def __init__(self, app: ASGIApp, metrics: Metrics | None, listeners: Sequence[Listener]) -> None:
        """`metrics` is None where nothing is counted."""
        self._app, self._metrics, self._listeners = app, metrics, listeners
        self._num_inflight = 0
        self._inflight = None if metrics is None else metrics.gauge("http_inflight_requests")
        self._answered: dict[tuple[str, str, int], Counter] = {}  # by route, method and status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; when its answer has ended, count it and close its record."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint = ENDPOINTS.get(route_path(scope)) if scope["method"] == "POST" else None
        record = None if endpoint is None else RequestRecord(endpoint, _trace_context(scope["headers"]))
        if record is not None:
            scope[_RECORD] = record
        status = CLIENT_LEFT

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._count_inflight(1)
        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._count_inflight(-1)
            self._count(scope, status)
            if record is not None:
                self._close(record, scope, status)

    def _close(self, record: RequestRecord, scope: Scope, status: int) -> None:
        record.closed()
        if record.is_handed_over:
            return
        record.status = status
        record.request_id, record.tenant = request_id(scope), tenant_of(Request(scope)).name
        if status >= 400 and status != CLIENT_LEFT:  # refused before routing
            record.answered_with_error(ApiError(status, "").type)
        for listener in self._listeners:
            try:
                listener(record)
            except Exception:  # a listener must not change the answer
                logger.exception("request %s could not be reported", record.request_id)

    def _count(self, scope: Scope, status: int) -> None:
        if self._metrics is None or is_own_probe(scope):
            return
        route, method = _template(scope), scope["method"] if scope["method"] in _METHODS else "other"
        answered = self._answered.get((route, method, status))
        if answered is None:
            answered = self._metrics.counter("http_requests_total", route=route, method=method, status=str(status))
            self._answered[route, method, status] = answered
        answered.inc()

    def _count_inflight(self, change: int) -> None:
        self._num_inflight += change
        if self._inflight is not None:
            self._inflight.set(self._num_inflight)


def _template(scope: Scope) -> str:
    """Return the route that matched, "/v1/models/{name}" for instance; "other" when none did."""
    return str(getattr(scope.get("route"), "path", "other"))


def _trace_context(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name in _KEPT_HEADERS}
