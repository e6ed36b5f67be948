"""When to come back: how long the queue will take at the rate measured lately."""

from __future__ import annotations

from collections import deque

from engine.scheduling.stats import EngineLoad

WINDOW_S = 10.0
MIN_S = 1.0
MAX_S = 60.0


class DrainRate:
    """How fast an engine works its queue off. Belongs to one thread, but for `retry_after_s`."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, int]] = deque()  # (time, prefill tokens, finished requests), totals
        self._prefill_tokens = 0

    def observe(self, now: float, prefill_tokens: int, num_finished: int) -> None:
        """A step computed `prefill_tokens`; `num_finished` requests have ended since the engine started."""
        self._prefill_tokens += prefill_tokens
        # A few marks a second are enough.
        if self._marks and now - self._marks[-1][0] < WINDOW_S / 100:
            return
        self._marks.append((now, self._prefill_tokens, num_finished))
        while now - self._marks[0][0] > WINDOW_S:
            self._marks.popleft()

    @property
    def finish_rate(self) -> float:
        """Requests finished per second, lately; 0 before any."""
        marks = list(self._marks)
        if len(marks) < 2:
            return 0.0
        (began, _, before), (ended, _, finished) = marks[0], marks[-1]
        return (finished - before) / max(ended - began, 1e-3)

    def retry_after_s(self, load: EngineLoad) -> float:
        """Seconds until half of the queue is gone, by tokens or by requests, whichever is later. 1 to 60."""
        marks = list(self._marks)
        if len(marks) < 2:
            return MIN_S
        (began, tokens_before, finished_before), (ended, tokens, finished) = marks[0], marks[-1]
        seconds = max(ended - began, 1e-3)
        token_rate = max((tokens - tokens_before) / seconds, 1.0)
        request_rate = max((finished - finished_before) / seconds, 0.1)
        wait = max(load.waiting_prefill_tokens / token_rate, load.num_waiting / request_rate) / 2
        return min(max(wait, MIN_S), MAX_S)
