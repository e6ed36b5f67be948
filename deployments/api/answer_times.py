"""One request's times and tokens as its client sees them, and which targets it met."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.config.settings import SloSettings
from monitoring.metrics import Metrics


@dataclass(slots=True)
class _Choice:
    first_at: float
    last_at: float
    num_tokens: int


class AnswerTimes:
    """Written to the metrics given with each call: whose request it is becomes known only after its arrival."""

    def __init__(self, targets: SloSettings, arrival: float) -> None:
        """`arrival` and all later times are of one clock, in seconds."""
        self._targets, self._arrival = targets, arrival
        self._choices: dict[int, _Choice] = {}

    def tokens(self, metrics: Metrics, index: int, count: int, now: float) -> None:
        """`count` tokens of a choice arrived together; they share the time since the last ones."""
        choice = self._choices.get(index)
        if choice is not None:
            metrics.observe("inter_token_latency_seconds", (now - choice.last_at) / count, count)
            choice.last_at, choice.num_tokens = now, choice.num_tokens + count
            return
        if not self._choices:
            first = now - self._arrival
            metrics.observe("time_to_first_token_seconds", first)
            _judge(metrics, "ttft", first, self._targets.ttft_s)
        self._choices[index] = _Choice(now, now, count)

    def ended(self, metrics: Metrics, now: float, *, is_whole: bool) -> None:
        """The request is over; an answer that is not whole has no duration to judge."""
        duration = now - self._arrival
        metrics.observe("request_duration_seconds", duration)
        metrics.observe("request_output_tokens", sum(choice.num_tokens for choice in self._choices.values()))
        several = [choice for choice in self._choices.values() if choice.num_tokens > 1]
        means = [(choice.last_at - choice.first_at) / (choice.num_tokens - 1) for choice in several]
        for mean in means:
            metrics.observe("time_per_output_token_seconds", mean)
        if means:
            _judge(metrics, "itl", sum(means) / len(means), self._targets.itl_s)
        if is_whole:
            _judge(metrics, "e2e", duration, self._targets.e2e_s)


def _judge(metrics: Metrics, slo: str, seconds: float, target: float) -> None:
    metrics.inc("slo_requests_total", slo=slo, met="true" if seconds <= target else "false")
