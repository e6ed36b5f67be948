"""Computes the masks of slow grammars in separate threads, and bounds the time that a request has for them.

    fast:  step N ─ token ─▶ step N + 1: mask, sample
    slow:  step N ─ token ─▶ a thread: mask ─▶ the first step that is planned after it: sample

Most masks take microseconds and are computed in their step. A grammar becomes slow when a step has to wait for a
mask, and fast again after some quick masks in a row.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from engine.base.machine import usable_cores

LATE_SECONDS = 0.002
"""Steps do not wait for a mask that takes more seconds than this."""
_QUICK_SECONDS = 0.0005
_QUICK_IN_A_ROW = 16
"""Consecutive masks below `_QUICK_SECONDS` that make a slow grammar fast again."""
_NICENESS = 5
"""How much lower the threads' priority is than that of steps, if the system has priorities of threads."""


class MaskThreads:
    """Threads for slow masks, shared by all requests of an engine. They start when they are first needed."""

    def __init__(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """`on_ready` is called in a thread when a mask is ready."""
        num_threads = max(2, usable_cores() // 4)
        self._threads = ThreadPoolExecutor(num_threads, "grammar-mask", initializer=_lower_priority)
        self._on_ready = on_ready

    def begin(self, work: Callable[[], None]) -> Future[None]:
        """Run `work` in a thread."""
        done = self._threads.submit(work)
        done.add_done_callback(lambda _: self._on_ready())
        return done

    def close(self) -> None:
        """Start no more work. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class MaskPace:
    """The pace of one request's masks, and its slow mask that is ready or being computed."""

    def __init__(
        self, threads: MaskThreads | None = None, budget_s: float = math.inf, *, is_slow: bool = False
    ) -> None:
        """Without `threads`, steps wait for every mask. Late masks, and masks that steps did not wait for, may
        take `budget_s` together. `is_slow`: whether the first mask may be slow.
        """
        self._threads, self._budget = threads, budget_s
        self._spent = 0.0
        self._is_slow = is_slow and threads is not None
        self._num_quick = 0
        self._work: _Work | None = None

    @property
    def is_slow(self) -> bool:
        """Whether a step may take the request only if `is_ready`."""
        return self._is_slow

    @property
    def is_over_budget(self) -> bool:
        """Whether the request has no time left. A thread may then hold its constraint forever: do not use it."""
        if self._spent > self._budget:
            return True
        return self._work is not None and self._spent + self._work.seconds > self._budget

    def took(self, seconds: float) -> None:
        """Record the time of a mask that a step waited for."""
        if seconds > LATE_SECONDS and self._threads is not None:
            self._is_slow, self._num_quick = True, 0
            self._spent += seconds

    def is_ready(self, position: int, compute: Callable[[], bytes]) -> bool:
        """Whether the mask at a position is ready or needs no thread; otherwise a thread calls `compute`."""
        if self.is_over_budget:
            return True
        if self._work is not None and self._work.position != position:
            self._settle(self._work)
        if self._work is None and self._is_slow:
            assert self._threads is not None
            self._work = _Work(position, compute, self._threads)
        return self._work is None or (self._work.is_done and self._work.position == position)

    def mask(self, position: int) -> bytes | None:
        """Return the mask at a position, b"" if the grammar failed there; None if no thread has computed it."""
        work = self._work
        return work.result() if work is not None and work.position == position and work.is_done else None

    def _settle(self, work: _Work) -> None:
        """Charge finished work."""
        if work.is_done:
            self._work = None
            self._spent += work.seconds
            self._num_quick = self._num_quick + 1 if work.seconds < _QUICK_SECONDS else 0
            self._is_slow = self._num_quick < _QUICK_IN_A_ROW


class _Work:
    """A mask that a thread computes."""

    def __init__(self, position: int, compute: Callable[[], bytes], threads: MaskThreads) -> None:
        self.position = position
        self._compute = compute
        self._began: float | None = None
        self._seconds: float | None = None
        self._clock = time.CLOCK_MONOTONIC
        self._mask = b""
        self._future = threads.begin(self._run)

    @property
    def is_done(self) -> bool:
        """Whether there is a mask or an error."""
        return self._future.done()

    @property
    def seconds(self) -> float:
        """Processor time that it has taken so far; elapsed time if the system does not report a thread's."""
        if self._seconds is not None:
            return self._seconds
        began = self._began
        return 0.0 if began is None else time.clock_gettime(self._clock) - began

    def result(self) -> bytes:
        """Return the mask, or raise the error of its computation."""
        self._future.result()
        return self._mask

    def _run(self) -> None:
        with contextlib.suppress(AttributeError):  # not on macOS
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        began = self._began = time.clock_gettime(self._clock)
        try:
            self._mask = self._compute()
        finally:
            self._seconds = time.clock_gettime(self._clock) - began


def _lower_priority() -> None:
    with contextlib.suppress(AttributeError, OSError):  # only on Linux do threads have their own priorities
        if os.uname().sysname == "Linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
