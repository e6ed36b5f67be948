"""Lag of a process's event loop: while one callback runs, every stream of the process waits.

A timer that should go off every 20 ms notes how late it does. A shorter gap may be missed; while no request is
open, so that no client waits, the timer goes off less often. A loop is late because of its own process's work, in
a long turn or in threads that hold the interpreter, or because the machine gives it no processor. Two numbers
distinguish these: the processor time that the process has used meanwhile, and how long the kernel let the loop's
thread wait for a processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable

from monitoring.metrics import Metrics

PERIOD_S = 0.02
IDLE_PERIOD_S = 0.1
WINDOW_S = 60.0
"""Seconds for which a delay is reported: longer than Prometheus's scrape interval."""


class LoopLag:
    """Measures one event loop from `start` to `close`."""

    def __init__(
        self,
        processor_time: Callable[[], float] = time.process_time,
        waited: Callable[[], float] | None = None,
        is_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """The first two return seconds since an earlier moment: how long this process has computed, and how long
        the loop's thread has waited for a processor; by default the kernel reports the latter.
        """
        self._processor_time = processor_time
        self._queue: RunQueue | None = None
        self._waited, self._is_idle = waited, is_idle
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._late, self._own = _Longest(), _Longest()
        self._began = self._used_before = self._waited_before = 0.0

    def start(self) -> None:
        """Measure the running event loop, from its thread."""
        self._loop = asyncio.get_running_loop()
        if self._waited is None:
            self._queue = RunQueue()
            self._waited = self._queue.waited_s
        self._wait(self._loop.time(), self._processor_time(), self._waited())

    def longest_s(self) -> float:
        """Return the longest delay of the last `WINDOW_S`, in seconds. Callable on the loop's thread."""
        return 0.0 if self._loop is None else self._late.since(self._loop.time() - WINDOW_S)

    def longest_own_s(self) -> float:
        """Return the part of it that this process's own work explains."""
        return 0.0 if self._loop is None else self._own.since(self._loop.time() - WINDOW_S)

    def report(self, metrics: Metrics) -> None:
        """Set the gauges of the longest delays."""
        metrics.set("ingress_loop_lag_seconds", self.longest_s())
        metrics.set("ingress_loop_own_lag_seconds", self.longest_own_s())

    def close(self) -> None:
        """Stop measuring. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queue is not None:
            self._queue.close()
            self._queue = self._waited = None

    def _wait(self, now: float, used: float, waited: float) -> None:
        """Begin the next period, with values read at the end of the last one: reading takes system calls."""
        assert self._loop is not None
        self._began, self._used_before, self._waited_before = now, used, waited
        due = now + (IDLE_PERIOD_S if self._is_idle() else PERIOD_S)
        self._timer = self._loop.call_at(due, self._note, due)

    def _note(self, due: float) -> None:
        assert self._loop is not None and self._waited is not None
        now, used, waited = self._loop.time(), self._processor_time(), self._waited()
        computed, queued = used - self._used_before, waited - self._waited_before
        self._late.add(now, now - due)
        # Other threads may have computed while this one waited for a processor: they did not delay the loop.
        self._own.add(now, max(0.0, min(now - due, computed, now - self._began - queued)))
        self._wait(now, used, waited)


class RunQueue:
    """The time for which the calling thread was ready to run without a processor, as Linux counts it.

    The second number of /proc/thread-self/schedstat, in nanoseconds (Documentation/scheduler/sched-stats.rst).
    Without that file, the time counts as zero.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def waited_s(self) -> float:
        """Return the seconds since the thread began. Callable on any thread."""
        if self._file is None:
            return 0.0
        return int(os.pread(self._file, 128, 0).split()[1]) / 1e9

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _Longest:
    """The longest of the delays since a moment."""

    def __init__(self) -> None:
        # (time, delay) in seconds: each is later and shorter than the one before, so the first is the longest.
        self._delays: deque[tuple[float, float]] = deque()

    def add(self, now: float, delay: float) -> None:
        """Note a delay, and forget those that no query can need."""
        while self._delays and self._delays[-1][1] <= delay:
            self._delays.pop()
        self._delays.append((now, delay))
        self.since(now - WINDOW_S)

    def since(self, begin: float) -> float:
        """Return the longest delay since `begin`, which never moves back; 0 if there was none."""
        while self._delays and self._delays[0][0] < begin:
            self._delays.popleft()
        return self._delays[0][1] if self._delays else 0.0
