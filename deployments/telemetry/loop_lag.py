"""How late a process's event loop is: while one callback runs, every stream of the process waits.

A timer that should go off every 20 ms notes how late it does. A gap that is shorter may be missed. A loop is
late because of what its own process computes, in a long turn or in threads that hold the interpreter, or because
the machine gives it no processor. The processor time that the process has used meanwhile tells the two apart.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from monitoring.metrics import Metrics

PERIOD_S = 0.02
WINDOW_S = 60.0
"""Seconds for which a delay is reported: longer than Prometheus takes between two looks."""


class LoopLag:
    """Measures one event loop from `start` to `close`."""

    def __init__(self, processor_time: Callable[[], float] = time.process_time) -> None:
        """`processor_time` returns the seconds that this process has computed."""
        self._processor_time = processor_time
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._late, self._own = _Longest(), _Longest()
        self._used = 0.0

    def start(self) -> None:
        """Measure the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._wait()

    def longest_s(self) -> float:
        """Return the longest delay of the last `WINDOW_S`, in seconds. Callable on the loop's thread."""
        return 0.0 if self._loop is None else self._late.since(self._loop.time() - WINDOW_S)

    def longest_own_s(self) -> float:
        """Return the same as far as this process's own work explains it."""
        return 0.0 if self._loop is None else self._own.since(self._loop.time() - WINDOW_S)

    def report(self, metrics: Metrics) -> None:
        """Set the gauges of the longest delays."""
        metrics.set("ingress_loop_lag_seconds", self.longest_s())
        metrics.set("ingress_loop_own_lag_seconds", self.longest_own_s())

    def close(self) -> None:
        """Measure no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        assert self._loop is not None
        due = self._loop.time() + PERIOD_S
        self._used = self._processor_time()
        self._timer = self._loop.call_at(due, self._note, due)

    def _note(self, due: float) -> None:
        assert self._loop is not None
        now = self._loop.time()
        late, used = now - due, self._processor_time() - self._used
        self._late.add(now, late)
        self._own.add(now, min(late, used))
        self._wait()


class _Longest:
    """The longest of the delays since a moment."""

    def __init__(self) -> None:
        # (time, delay) in seconds: each is later and shorter than the one before, so the first is the longest.
        self._delays: deque[tuple[float, float]] = deque()

    def add(self, now: float, delay: float) -> None:
        """Note a delay, and forget those that will not be asked for."""
        while self._delays and self._delays[-1][1] <= delay:
            self._delays.pop()
        self._delays.append((now, delay))
        self.since(now - WINDOW_S)

    def since(self, begin: float) -> float:
        """Return the longest delay since `begin`, which never moves back; 0 if there was none."""
        while self._delays and self._delays[0][0] < begin:
            self._delays.popleft()
        return self._delays[0][1] if self._delays else 0.0
