"""What the API counts: one recorder per request, the only place here that knows metric names.

Token totals are the engines' to count; here is what a client sees.
"""

from __future__ import annotations

import time
from typing import Literal

from deployments.admission.rate_limits import RateLimited
from deployments.api.answer_times import AnswerTimes
from deployments.api.report import Report
from deployments.client.protocol import Overloaded, Unavailable
from deployments.config.settings import SloSettings
from deployments.config.tenants import ANONYMOUS
from monitoring.metrics import Metrics

Endpoint = Literal["chat_completions", "completions", "other"]


class Recorder:
    """Counts one request. All times run from its arrival at the API, tokenizing included."""

    def __init__(
        self,
        metrics: Metrics | None,
        endpoint: Endpoint,
        report: Report,
        tenant: str = ANONYMOUS.name,
        targets: SloSettings | None = None,
    ) -> None:
        """`tenant` is a name from the configuration; `report` hears how it ends."""
        self.report = report
        self._metrics = metrics
        self._tenant = tenant
        self._endpoint = endpoint
        self._times = AnswerTimes(targets or SloSettings(), time.perf_counter())
        self._is_streaming = False
        self._is_accepted = False
        self._is_over = False

    def count_to(self, metrics: Metrics | None) -> None:
        """It is known whose request it is: count it there."""
        self._metrics = metrics

    def accepted(self, *, stream: bool) -> None:
        """The request is valid; from here on it ends with a finish reason."""
        self._is_streaming = stream
        self._is_accepted = True
        if self._metrics is not None:
            self._metrics.inc("tenant_requests_total", tenant=self._tenant)

    def prompt(self, num_tokens: int) -> None:
        """Its prompts were admitted, with so many tokens in all."""
        if self._metrics is not None:
            self._metrics.inc("tenant_tokens_total", num_tokens, tenant=self._tenant, kind="prompt")
            self._metrics.observe("request_prompt_tokens", num_tokens)

    def tokens(self, choice: int, count: int) -> None:
        """`count` tokens of a choice arrived together."""
        if self._metrics is None or count == 0:
            return
        self._metrics.inc("tenant_tokens_total", count, tenant=self._tenant, kind="generated")
        self._times.tokens(self._metrics, choice, count, time.perf_counter())

    def reasoned(self, num_tokens: int) -> None:
        """So many of its tokens were reasoning; told once, at its end."""
        if self._metrics is not None:
            self._metrics.inc("reasoning_tokens_total", num_tokens)

    def finished(self, finish_reason: str) -> None:
        """The answer is complete."""
        self._end(finish_reason)

    def failed(self, status: int, error_type: str) -> None:
        """The answer is an error, or the stream ended with one."""
        self.report.failed(error_type)
        if self._metrics is not None:
            self._metrics.inc(
                "request_errors_total", endpoint=self._endpoint, status=str(status), error_type=error_type
            )
        self._end("error")

    def refused(self, error: Exception) -> None:
        """The engines, or the tenant's limits, did not take it."""
        reason: str | None = None
        if isinstance(error, Overloaded | RateLimited):
            reason = error.kind
        elif isinstance(error, Unavailable):
            reason = "unavailable"
        self.report.reason = reason
        if self._metrics is not None and reason is not None:
            self._metrics.inc("admission_rejections_total", reason=reason)
            self._metrics.inc("tenant_rejections_total", tenant=self._tenant, reason=reason)

    def disconnected(self) -> None:
        """The client hung up. Changes nothing when the answer was over."""
        if self._metrics is not None and self._is_streaming and not self._is_over:
            self._metrics.inc("stream_disconnects_total")
        self._end("abort")

    def _end(self, finish_reason: str) -> None:
        """A request that was never accepted is an error but no finished request."""
        self.report.ended(finish_reason)
        if self._metrics is None or not self._is_accepted or self._is_over:
            return
        self._is_over = True
        self._metrics.inc(
            "requests_total",
            endpoint=self._endpoint,
            streaming="true" if self._is_streaming else "false",
            finish_reason=finish_reason,
        )
        is_whole = finish_reason in ("stop", "length", "tool_calls")
        self._times.ended(self._metrics, time.perf_counter(), is_whole=is_whole)
