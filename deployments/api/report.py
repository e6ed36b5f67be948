"""What becomes known of one generating request, from its arrival to the last byte of its answer.

`Reporting` opens the report, the layers below fill it in, and when the answer is out it goes to whoever listens:
the request log, traces. The `timings` of an answer are read from it as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.choices import Choices
from deployments.api.errors import ApiError
from deployments.api.http.access import route_path, tenant_of
from deployments.api.http.transport import request_id
from deployments.api.output.response_encoder import ResponseContext
from engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

ENDPOINTS: Mapping[str, Literal["chat_completions", "completions"]] = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
}
"""By path: what is reported on."""
CLIENT_LEFT = 499
"""Stands for the status of an answer whose client left before it began."""
_REPORT = "raydix.report"
_KEPT_HEADERS = (b"traceparent", b"tracestate")

Outcome = Literal["finished", "aborted", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Began:
    """A request that was valid, and what it generates."""

    answer: ResponseContext
    sampling: SamplingParams
    is_stream: bool
    choices: Choices


class Report:
    """One request. `arrival` and `ended_at` are clocks of `time.monotonic`, `arrived_at` is in Unix time."""

    def __init__(self, endpoint: str, headers: Mapping[str, str]) -> None:
        self.arrival, self.arrived_at = time.monotonic(), time.time()
        self.endpoint = endpoint
        self.headers = headers
        """The request's trace context, by lower-case name."""
        self.request_id = self.tenant = ""
        self.model: str | None = None
        """A served model's name, never what a client sent; None when none was found."""
        self.began: Began | None = None
        self.status = CLIENT_LEFT
        self.finish_reason: str | None = None
        """As counted: the first choice's, "error" or "abort"; None of a request that was never accepted."""
        self.error_type: str | None = None
        self.reason: str | None = None
        """Of a refusal: as `admission_rejections_total` counts it."""
        self.trace_id: str | None = None
        """Of the trace that tells of it, where there is one."""
        self.ended_at: float | None = None
        """None before the answer is out."""

    def ended(self, finish_reason: str) -> None:
        """It is over for the client. What comes after the first end is of no account."""
        self.finish_reason = self.finish_reason or finish_reason

    def failed(self, error_type: str) -> None:
        """The answer is an error, or the stream ended with one. Changes nothing when it was over."""
        if self.finish_reason is None:
            self.error_type = error_type
        self.ended("error")

    @property
    def first_token_at(self) -> float | None:
        """Clock at the first token of any choice."""
        choices = self.began.choices.choices if self.began is not None else []
        return min((choice.first_at for choice in choices if choice.first_at is not None), default=None)

    @property
    def outcome(self) -> Outcome:
        """ "refused" when nothing was generated, because of the request, its tenant's limits or the load."""
        if self.error_type is not None:
            is_refusal = 400 <= self.status < 500 or (self.status == 503 and self.first_token_at is None)
            return "refused" if is_refusal else "failed"
        return "finished" if self.finish_reason not in (None, "abort") else "aborted"


Listener = Callable[[Report], None]


def report_of(request: Request) -> Report:
    """The report that `Reporting` opened for a request."""
    report: Report = request.scope[_REPORT]
    return report


class Reporting:
    """The outermost layer: opens a report for each request to generate, and closes it with its answer."""

    def __init__(self, app: ASGIApp, listeners: Sequence[Listener]) -> None:
        self._app, self._listeners = app, listeners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and tell the listeners when it is over."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = ENDPOINTS.get(route_path(scope)) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        report = scope[_REPORT] = Report(endpoint, _decoded(scope["headers"]))

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                report.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._close(report, scope)

    def _close(self, report: Report, scope: Scope) -> None:
        report.ended_at = time.monotonic()
        report.request_id, report.tenant = request_id(scope), tenant_of(Request(scope)).name
        if report.status >= 400 and report.status != CLIENT_LEFT:  # what was refused before it came to the routes
            report.failed(ApiError(report.status, "").type)
        for listener in self._listeners:
            try:
                listener(report)
            except Exception:  # what is told of a request must not change its answer
                logger.exception("request %s could not be reported", report.request_id)


def _decoded(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name in _KEPT_HEADERS}
