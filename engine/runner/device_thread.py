"""The thread that runs steps: one of their own, while the next one is planned, or the caller's."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


# Seconds that an exiting interpreter waits for the step in flight, because interrupting it would crash.
_EXIT_SECONDS = 10.0


class DeviceThread(Generic[T]):
    """Runs queued work in order. Its thread ends when this object is collected, or with the interpreter."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Launched[T] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work_off, args=(self._work,), name="engine-device", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._work, self._thread)

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        """Queue `work` and return immediately."""
        launched = Launched(work)
        self._work.put(launched)
        return launched

    def close(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the end of all queued work. Nothing may be launched after this call.
        Idempotent.
        """
        self._end.detach()
        _end(self._work, self._thread, timeout)


class CallerThread(Generic[T]):
    """Runs work immediately, in the thread that launches it."""

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        """Run `work` and return after it."""
        launched = Launched(work)
        launched.run()
        return launched

    def close(self, timeout: float) -> None:
        """Do nothing: no work is left."""


Launcher = DeviceThread[T] | CallerThread[T]


class Launched(Generic[T]):
    """Work that was queued."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done = threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None
        self._result: T

    def run(self) -> None:
        """Execute the work. Its thread calls this exactly once."""
        try:
            self._result = self._work()
        except BaseException as error:  # raised again by `wait`
            self._error = error
        self._done.release()

    def is_done_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the work; returns whether it ended."""
        if not self._done.acquire(timeout=max(seconds, 0.0)):
            return False
        self._done.release()
        return True

    def wait(self) -> T:
        """Wait for the result of the work and return it, or raise its error."""
        self._done.acquire()
        self._done.release()
        if self._error is not None:
            raise self._error
        return self._result


def _end(
    work: queue.SimpleQueue[Launched[T] | None], thread: threading.Thread, timeout: float = _EXIT_SECONDS
) -> None:
    work.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout)


def _work_off(work: queue.SimpleQueue[Launched[T] | None]) -> None:
    while (launched := work.get()) is not None:
        launched.run()
        del launched  # Otherwise its result would live until the next work.
