"""The metrics of a generating request; no other module of the API knows their names.

This module has no clock: all times come from the request's record. Engines count token totals; these metrics
measure what a client sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from deployments.config.settings import SloSettings
from deployments.config.tenants import ANONYMOUS
from monitoring.metrics import Metrics

Endpoint = Literal["chat_completions", "completions", "messages", "responses", "embeddings", "rerank", "score"]


def count_conversation(metrics: Metrics | None, num_chars: int, num_new: int) -> None:
    """Count the characters of a rendered conversation, of which `num_new` have to be tokenized."""
    if metrics is not None:
        metrics.inc("conversation_characters_total", num_new, source="tokenized")
        metrics.inc("conversation_characters_total", num_chars - num_new, source="kept")


class RequestMetrics:
    """Counts one request in the metrics of its model and tenant."""

    def __init__(
        self,
        metrics: Metrics | None,
        endpoint: Endpoint,
        tenant: str = ANONYMOUS.name,
        targets: SloSettings | None = None,
    ) -> None:
        """`metrics` is None where nothing is counted. `tenant` is a name from the configuration."""
        self._metrics, self._endpoint, self._tenant = metrics, endpoint, tenant
        self._targets = targets or SloSettings()

    def count_to(self, metrics: Metrics | None) -> None:
        """Count in this model's metrics from now on, once the request's model is known."""
        self._metrics = metrics

    def accepted(self) -> None:
        """Count a valid request."""
        if self._metrics is not None:
            self._metrics.inc("tenant_requests_total", tenant=self._tenant)

    def prompt(self, num_tokens: int) -> None:
        """Count the tokens of prompts that the tenant's limits admitted."""
        if self._metrics is not None:
            self._metrics.inc("tenant_tokens_total", num_tokens, tenant=self._tenant, kind="prompt")
            self._metrics.observe("request_prompt_tokens", num_tokens)

    def tokens(self, count: int) -> None:
        """Count generated tokens that arrived together."""
        if self._metrics is not None:
            self._metrics.inc("tenant_tokens_total", count, tenant=self._tenant, kind="generated")

    def first_token(self, seconds: float) -> None:
        """Observe the time from the request's arrival to the first token of any choice."""
        if self._metrics is not None:
            self._metrics.observe("time_to_first_token_seconds", seconds)
            self._judge("ttft", seconds, self._targets.ttft_s)

    def next_tokens(self, seconds: float, count: int) -> None:
        """Observe `count` tokens that arrived together, `seconds` after the choice's previous ones."""
        if self._metrics is not None:
            self._metrics.observe("inter_token_latency_seconds", seconds / count, count)

    def reasoned(self, num_tokens: int) -> None:
        """Count the reasoning tokens of a choice that has ended."""
        if self._metrics is not None:
            self._metrics.inc("reasoning_tokens_total", num_tokens)

    def refused(self, reason: str) -> None:
        """Count a request that the engines or the tenant's limits refused."""
        if self._metrics is not None:
            self._metrics.inc("admission_rejections_total", reason=reason)
            self._metrics.inc("tenant_rejections_total", tenant=self._tenant, reason=reason)

    def failed(self, status: int, error_type: str) -> None:
        """Count an error that was sent to the client."""
        if self._metrics is not None:
            self._metrics.inc(
                "request_errors_total", endpoint=self._endpoint, status=str(status), error_type=error_type
            )

    def disconnected(self) -> None:
        """Count a stream whose client disconnected before its end."""
        if self._metrics is not None:
            self._metrics.inc("stream_disconnects_total")

    def ended(
        self,
        finish_reason: str,
        seconds: float,
        num_tokens: int,
        token_seconds: Sequence[float],
        *,
        is_stream: bool,
    ) -> None:
        """Count an accepted request that has ended. Only complete answers are judged by their duration.

        `token_seconds` holds the mean time per output token of each choice with at least two.
        """
        if self._metrics is None:
            return
        self._metrics.inc(
            "requests_total",
            endpoint=self._endpoint,
            streaming="true" if is_stream else "false",
            finish_reason=finish_reason,
        )
        self._metrics.observe("request_duration_seconds", seconds)
        self._metrics.observe("request_output_tokens", num_tokens)
        for mean in token_seconds:
            self._metrics.observe("time_per_output_token_seconds", mean)
        if token_seconds:
            self._judge("itl", sum(token_seconds) / len(token_seconds), self._targets.itl_s)
        if finish_reason in ("stop", "length", "tool_calls"):
            self._judge("e2e", seconds, self._targets.e2e_s)

    def _judge(self, slo: str, seconds: float, target: float) -> None:
        if self._metrics is not None:
            self._metrics.inc("slo_requests_total", slo=slo, met="true" if seconds <= target else "false")
