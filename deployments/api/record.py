"""The record of one generating request, from its arrival to the last byte of its answer.

    observation opens it ─▶ route, exchange: what happens, when ─▶ observation closes it ─▶ listeners
                                   └──▶ RequestMetrics

The `timings` of an answer, its log line, its trace and its metrics are all read from this record, so they agree:
it has one clock, `time.monotonic`, and writes each moment down once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from deployments.admission.rate_limits import RateLimited
from deployments.api.choices import Choices
from deployments.api.output.response_encoder import ResponseContext
from deployments.api.request_metrics import Endpoint, RequestMetrics
from deployments.client.protocol import Overloaded, Unavailable
from engine.sampling_params import SamplingParams

CLIENT_LEFT = 499
"""Stands for the status of an answer whose client left before it began."""

Outcome = Literal["finished", "aborted", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class GenerationStart:
    """A request that was valid, and what it generates."""

    answer: ResponseContext
    sampling: SamplingParams
    is_stream: bool
    choices: Choices


@dataclass(slots=True)
class ChoiceTimes:
    """When one choice's tokens came to be read, by the record's clock."""

    first_at: float | None = None
    """None before its first token."""
    last_at: float = 0.0
    ended_at: float | None = None
    """None before its end."""
    num_tokens: int = 0

    @property
    def seconds_per_token(self) -> float | None:
        """The mean time per output token after the first; None for less than two tokens."""
        if self.first_at is None or self.num_tokens < 2:
            return None
        return (self.last_at - self.first_at) / (self.num_tokens - 1)


class RequestRecord:
    """One request. Clock times are `time.monotonic`'s, `arrived_at` is Unix time."""

    def __init__(
        self, endpoint: Endpoint, headers: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self.arrival, self.arrived_at = clock(), time.time()
        self.endpoint: Endpoint = endpoint
        self.headers = headers
        """The request's trace context, by lower-case name."""
        self.metrics = RequestMetrics(None, endpoint)
        """Counts nothing until the route says for whom."""
        self.request_id = self.tenant = ""
        self.model: str | None = None
        """A served model's name, never what a client sent; None when none was found."""
        self.generation: GenerationStart | None = None
        """None for a request that was not valid."""
        self.choice_times: dict[int, ChoiceTimes] = {}
        """By the choice's index."""
        self.status = CLIENT_LEFT
        self.finish_reason: str | None = None
        """As counted: the first choice's, "error" or "abort"; None for a request that was never accepted."""
        self.error_type: str | None = None
        self.reason: str | None = None
        """Why it was refused, as `admission_rejections_total` counts it."""
        self.trace_id: str | None = None
        """The trace that tells of it, where there is one."""
        self.ended_at: float | None = None
        """Clock when the answer was out; None before that."""
        self._is_counted = False

    # --- what happens --------------------------------------------------------------------------------------

    def accepted(self, generation: GenerationStart) -> None:
        """The request is valid; from here on it ends with a finish reason."""
        self.generation = generation
        self.metrics.accepted()

    def received(self, choice: int, num_tokens: int, *, is_last: bool) -> None:
        """Tokens of a choice arrived together, or its end."""
        now, times = self._clock(), self.choice_times.setdefault(choice, ChoiceTimes())
        if num_tokens:
            self.metrics.tokens(num_tokens)
            if times.first_at is not None:
                self.metrics.next_tokens(now - times.last_at, num_tokens)
            elif self.first_token_at is None:
                self.metrics.first_token(now - self.arrival)
            times.first_at = now if times.first_at is None else times.first_at
            times.last_at = now
            times.num_tokens += num_tokens
        if is_last:
            times.ended_at = now

    def finished(self, finish_reason: str) -> None:
        """The answer is complete."""
        self._end(finish_reason)

    def failed(self, status: int, error_type: str) -> None:
        """The answer is an error, or the stream ended with one. Does not change the outcome when it was over."""
        self.told_error(error_type)
        self.metrics.failed(status, error_type)
        self._end("error")

    def told_error(self, error_type: str) -> None:
        """The client got an error that is not counted as this request's."""
        if self.finish_reason is None:
            self.error_type, self.finish_reason = error_type, "error"

    def refused(self, error: Exception) -> None:
        """The engines, or the tenant's limits, did not take it."""
        self.reason = None
        if isinstance(error, Overloaded | RateLimited):
            self.reason = error.kind
        elif isinstance(error, Unavailable):
            self.reason = "unavailable"
        if self.reason is not None:
            self.metrics.refused(self.reason)

    def disconnected(self) -> None:
        """The client hung up. Changes nothing when the answer was over."""
        if self.generation is not None and self.generation.is_stream and not self._is_counted:
            self.metrics.disconnected()
        self._end("abort")

    def closed(self) -> None:
        """The last byte of the answer is out."""
        self.ended_at = self._clock()

    def _end(self, finish_reason: str) -> None:
        """Count the request, once; one that was never accepted is an error but no finished request."""
        self.finish_reason = self.finish_reason or finish_reason
        if self.generation is None or self._is_counted:
            return
        self._is_counted = True
        times = self.choice_times.values()
        means = [mean for choice in times if (mean := choice.seconds_per_token) is not None]
        self.metrics.ended(
            finish_reason,
            self._clock() - self.arrival,
            sum(choice.num_tokens for choice in times),
            means,
            is_stream=self.generation.is_stream,
        )

    # --- what is read --------------------------------------------------------------------------------------

    def now(self) -> float:
        """When the answer was out, or the clock now."""
        return self._clock() if self.ended_at is None else self.ended_at

    @property
    def first_token_at(self) -> float | None:
        """Clock at the first token of any choice."""
        firsts = [times.first_at for times in self.choice_times.values() if times.first_at is not None]
        return min(firsts, default=None)

    @property
    def outcome(self) -> Outcome:
        """ "refused" when nothing was generated, because of the request, its tenant's limits or the load."""
        if self.error_type is not None:
            is_refusal = 400 <= self.status < 500 or (self.status == 503 and self.first_token_at is None)
            return "refused" if is_refusal else "failed"
        return "finished" if self.finish_reason not in (None, "abort") else "aborted"


Listener = Callable[[RequestRecord], None]
