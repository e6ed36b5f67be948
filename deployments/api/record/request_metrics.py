"""The metrics of a generating request; no other module of the API knows their names.

This module has no clock: all times come from the request's record. Engines count token totals; these metrics
measure what a client sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from deployments.config.settings import SloSettings
from deployments.config.tenants import ANONYMOUS
from monitoring.metrics import Counter, Metrics

Endpoint = Literal["chat_completions", "completions", "messages", "responses", "embeddings", "rerank", "score"]
_NO_TARGETS = SloSettings()


def count_conversation(metrics: Metrics | None, num_chars: int, num_new: int) -> None:
    """Count the characters of a rendered conversation, of which `num_new` have to be tokenized."""
    if metrics is not None:
        tokenized, kept = _conversation_series(metrics)
        tokenized.inc(num_new)
        kept.inc(num_chars - num_new)


@lru_cache(maxsize=256)  # one entry for each model
def _conversation_series(metrics: Metrics) -> tuple[Counter, Counter]:
    name = "conversation_characters_total"
    return metrics.counter(name, source="tokenized"), metrics.counter(name, source="kept")


class _TenantSeries:
    """The series in which a model counts every request of a tenant, looked up once for all of them."""

    def __init__(self, metrics: Metrics, tenant: str) -> None:
        self.requests = metrics.counter("tenant_requests_total", tenant=tenant)
        self.prompt_tokens = metrics.counter("tenant_tokens_total", tenant=tenant, kind="prompt")
        self.generated_tokens = metrics.counter("tenant_tokens_total", tenant=tenant, kind="generated")
        self.prompt_lengths = metrics.series("request_prompt_tokens")
        self.output_lengths = metrics.series("request_output_tokens")
        self.durations = metrics.series("request_duration_seconds")
        self.first_tokens = metrics.series("time_to_first_token_seconds")
        self.next_tokens = metrics.series("inter_token_latency_seconds")
        self.mean_tokens = metrics.series("time_per_output_token_seconds")
        self.judged = {
            (slo, is_met): metrics.counter("slo_requests_total", slo=slo, met="true" if is_met else "false")
            for slo in ("ttft", "itl", "e2e")
            for is_met in (True, False)
        }


_tenant_series = lru_cache(maxsize=4096)(_TenantSeries)


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
        self._targets = targets or _NO_TARGETS
        self._series = None if metrics is None else _tenant_series(metrics, tenant)

    def count_to(self, metrics: Metrics | None) -> None:
        """Count in this model's metrics from now on, once the request's model is known."""
        self._metrics = metrics
        self._series = None if metrics is None else _tenant_series(metrics, self._tenant)

    def accepted(self) -> None:
        """Count a valid request."""
        if self._series is not None:
            self._series.requests.inc()

    def prompt(self, num_tokens: int) -> None:
        """Count the tokens of prompts that the tenant's limits admitted."""
        if self._series is not None:
            self._series.prompt_tokens.inc(num_tokens)
            self._series.prompt_lengths.observe(num_tokens)

    def tokens(self, count: int) -> None:
        """Count generated tokens that arrived together."""
        if self._series is not None:
            self._series.generated_tokens.inc(count)

    def first_token(self, seconds: float) -> None:
        """Observe the time from the request's arrival to the first token of any choice."""
        if self._series is not None:
            self._series.first_tokens.observe(seconds)
            self._series.judged["ttft", seconds <= self._targets.ttft_s].inc()

    def next_tokens(self, seconds: float, count: int) -> None:
        """Observe `count` tokens that arrived together, `seconds` after the choice's previous ones."""
        if self._series is not None:
            self._series.next_tokens.observe(seconds / count, count)

    def reasoned(self, num_tokens: int) -> None:
        """Count the reasoning tokens of a choice that has ended."""
        if self._metrics is not None and num_tokens:
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

    def resumed(self, outcome: Literal["adopted", "regenerated", "refused"]) -> None:
        """Count a request to continue a stream: from the replicas that have it, by generating it again, or not."""
        if self._metrics is not None:
            self._metrics.inc("stream_resumptions_total", outcome=outcome)

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
        if self._metrics is None or self._series is None:
            return
        series, targets = self._series, self._targets
        self._metrics.inc(
            "requests_total",
            endpoint=self._endpoint,
            streaming="true" if is_stream else "false",
            finish_reason=finish_reason,
        )
        series.durations.observe(seconds)
        series.output_lengths.observe(num_tokens)
        for mean in token_seconds:
            series.mean_tokens.observe(mean)
        if token_seconds:
            series.judged["itl", sum(token_seconds) / len(token_seconds) <= targets.itl_s].inc()
        if finish_reason in ("stop", "length", "tool_calls"):
            series.judged["e2e", seconds <= targets.e2e_s].inc()
