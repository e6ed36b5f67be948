"""The utilisation of the fleet's prefill, from which the cost derives its weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.cost import Candidate


class Utilisation:
    """The share of replicas with prefill work, averaged over the time before.

    It is sampled whenever a prompt comes, which for chance arrivals sees what an average over time would (Wolff
    1982).
    """

    def __init__(self, horizon_s: float = 10.0) -> None:
        """`horizon_s`: seconds after which a sample counts 1/e."""
        if not horizon_s > 0.0:
            raise ValueError(f"the horizon must be above 0 s, got {horizon_s}")
        self._horizon_s = horizon_s
        self._value = 0.0
        self._weight = 0.0
        self._last = -math.inf

    def observe(self, replicas: Sequence[Candidate], now: float) -> float:
        """Sample the replicas that can serve; return the average, 0..1. `now` in seconds, never falling."""
        serving = [candidate for candidate in replicas if candidate.is_available]
        if serving:
            busy = sum(candidate.queued_prefill_tokens > 0.0 for candidate in serving) / len(serving)
            kept = math.exp((self._last - now) / self._horizon_s)
            # The weight keeps the first samples from being averaged with samples that never were.
            self._weight = self._weight * kept + 1.0
            self._value += (busy - self._value) / self._weight
            self._last = now
        return self._value
