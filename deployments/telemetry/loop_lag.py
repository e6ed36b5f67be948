"""How late a process's event loop is: while one callback runs, every stream of the process waits.

A timer that should go off every 20 ms notes how late it does. A gap that is shorter than that may be missed.
"""

from __future__ import annotations

import asyncio
from collections import deque

from monitoring.metrics import Metrics

PERIOD_S = 0.02
WINDOW_S = 60.0
"""Seconds for which a delay is reported: longer than Prometheus takes between two looks."""


class LoopLag:
    """Measures one event loop from `start` to `close`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        # (time, delay) in seconds: each is later and shorter than the one before, so the first is the longest.
        self._longest: deque[tuple[float, float]] = deque()

    def start(self) -> None:
        """Measure the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._wait()

    def longest_s(self) -> float:
        """Return the longest delay of the last `WINDOW_S`, in seconds. Callable on the loop's thread."""
        if self._loop is None:
            return 0.0
        while self._longest and self._longest[0][0] < self._loop.time() - WINDOW_S:
            self._longest.popleft()
        return self._longest[0][1] if self._longest else 0.0

    def report(self, metrics: Metrics) -> None:
        """Set the gauge of the longest delay."""
        metrics.set("ingress_loop_lag_seconds", self.longest_s())

    def close(self) -> None:
        """Measure no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        assert self._loop is not None
        due = self._loop.time() + PERIOD_S
        self._timer = self._loop.call_at(due, self._note, due)

    def _note(self, due: float) -> None:
        assert self._loop is not None
        now = self._loop.time()
        late = now - due
        while self._longest and self._longest[-1][1] <= late:
            self._longest.pop()
        self._longest.append((now, late))
        if self._longest[0][0] < now - WINDOW_S:
            self._longest.popleft()
        self._wait()
