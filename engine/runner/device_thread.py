"""The thread in which steps run while the next one is planned."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


# How long an interpreter that exits waits for the step in flight: one that is cut off in a model's step crashes.
_EXIT_SECONDS = 10.0


class DeviceThread(Generic[T]):
    """Runs what it is handed, one after the other, in order. Its thread ends with it, or with the interpreter."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Launched[T] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work_off, args=(self._work,), name="engine-device", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._work, self._thread)

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        """Have `work` run; returns at once."""
        launched = Launched(work)
        self._work.put(launched)
        return launched

    def close(self, timeout: float) -> None:
        """Let what was handed in come to its end, for up to `timeout` seconds. Nothing may be handed in after it.
        Idempotent.
        """
        self._end.detach()
        _end(self._work, self._thread, timeout)


class Launched(Generic[T]):
    """Work that was handed in."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done = threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None
        self._result: T

    def run(self) -> None:
        """Once, by the thread."""
        try:
            self._result = self._work()
        except BaseException as error:  # for whoever waits
            self._error = error
        self._done.release()

    def is_done_within(self, seconds: float) -> bool:
        """Wait for its end, but no longer."""
        if not self._done.acquire(timeout=max(seconds, 0.0)):
            return False
        self._done.release()
        return True

    def wait(self) -> T:
        """Its result, once it is there; raises what it raised."""
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
        del launched  # its result must not live until the next one comes
