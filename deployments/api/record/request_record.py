"""The record of one generating request, from its arrival to the last byte of its answer.

    observation opens it ─▶ route, exchange: events and times ─▶ observation closes it ─▶ listeners
                                   └──▶ RequestMetrics

The `timings` of an answer, its log line, its trace and its metrics are all read from this record, so they agree:
it has one clock, `time.monotonic`, and records each time once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from deployments.admission.rate_limits import RateLimited
from deployments.api.output.choices import Choices
from deployments.api.output.response_encoder import ResponseContext
from deployments.api.record.request_metrics import Endpoint, RequestMetrics
from deployments.client.protocol import Overloaded, Unavailable
from engine.values.sampling_params import SamplingParams

CLIENT_LEFT = 499
"""Status of an answer whose client disconnected before it began."""

Outcome = Literal["finished", "aborted", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class GenerationStart:
    """A valid request and the choices that it generates."""

    answer: ResponseContext
    sampling: SamplingParams
    is_stream: bool
    choices: Choices


@dataclass(slots=True)
class ChoiceTimes:
    """Times at which one choice's tokens were read, by the record's clock."""

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
    """Records one request. Times are by `time.monotonic`, except `arrived_at`, which is Unix time."""

    def __init__(
        self, endpoint: Endpoint, headers: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self.arrival, self.arrived_at = clock(), time.time()
        self.endpoint: Endpoint = endpoint
        self.headers = headers
        """The request's trace context, by lower-case name."""
        self.metrics = RequestMetrics(None, endpoint)
        """Counts nothing until the route replaces it with the tenant's."""
        self.request_id = self.tenant = ""
        self.model: str | None = None
        """Name of the served model, never the client's text; None when no model was found."""
        self.generation: GenerationStart | None = None
        """None for a request that was not valid."""
        self.choice_times: dict[int, ChoiceTimes] = {}
        """Times of each choice, by its index."""
        self.status = CLIENT_LEFT
        self.finish_reason: str | None = None
        """The first choice's, "error" or "abort"; None for a request that has not ended."""
        self.error_type: str | None = None
        self.ignored_fields: Sequence[str] = ()
        """Names of fields that were ignored, as `limits.unknown_fields` has it."""
        self.reason: str | None = None
        """Reason of a refusal, as `admission_rejections_total` counts it."""
        self.trace_id: str | None = None
        """Id of the request's trace; None when it is not traced."""
        self.ended_at: float | None = None
        """Clock when the answer was fully sent; None before that."""
        self.is_handed_over = False
        """Whether the answer is generated in the background, by a request with a record of its own."""
        self._is_counted = False

    # --- events --------------------------------------------------------------------------------------------

    def accepted(self, generation: GenerationStart) -> None:
        """Record that the request is valid, so that it will end with a finish reason."""
        self.generation = generation
        self.metrics.accepted()

    def received(self, choice: int, num_tokens: int, *, is_last: bool) -> None:
        """Record tokens of a choice that arrived together, or its end."""
        now, times = self._clock(), self.choice_times.get(choice)
        if times is None:
            times = self.choice_times[choice] = ChoiceTimes()
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
        """Record that the answer is complete."""
        self._end(finish_reason)

    def failed(self, status: int, error_type: str) -> None:
        """Record that the answer or its last event is an error; an earlier outcome stays."""
        self.answered_with_error(error_type)
        self.metrics.failed(status, error_type)
        self._end("error")

    def answered_with_error(self, error_type: str) -> None:
        """Record an error that the client got, without counting it; an earlier outcome stays."""
        if self.finish_reason is None:
            self.error_type, self.finish_reason = error_type, "error"

    def refused(self, error: Exception) -> None:
        """Record that the engines or the tenant's limits refused the request."""
        self.reason = None
        if isinstance(error, Overloaded | RateLimited):
            self.reason = error.kind
        elif isinstance(error, Unavailable):
            self.reason = "unavailable"
        if self.reason is not None:
            self.metrics.refused(self.reason)

    def disconnected(self) -> None:
        """Record that the client disconnected; an earlier outcome stays."""
        if self.generation is not None and self.generation.is_stream and not self._is_counted:
            self.metrics.disconnected()
        self._end("abort")

    def closed(self) -> None:
        """Record that the last byte of the answer was sent."""
        self.ended_at = self._clock()

    def _end(self, finish_reason: str) -> None:
        """Set the finish reason and count the request, once, if it was accepted."""
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

    # --- results -------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the clock when the answer was fully sent, or the current clock before that."""
        return self._clock() if self.ended_at is None else self.ended_at

    @property
    def first_token_at(self) -> float | None:
        """Clock at the first token of any choice; None before it."""
        firsts = [times.first_at for times in self.choice_times.values() if times.first_at is not None]
        return min(firsts, default=None)

    @property
    def outcome(self) -> Outcome:
        """The outcome: "refused" means that the request, its tenant's limits or the load prevented generation."""
        if self.error_type is not None:
            is_refusal = 400 <= self.status < 500 or (self.status == 503 and self.first_token_at is None)
            return "refused" if is_refusal else "failed"
        return "finished" if self.finish_reason not in (None, "abort") else "aborted"


Listener = Callable[[RequestRecord], None]
