"""A rank's part of the pages that other engines fetch: read when the first rank says so, and written likewise."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from engine.attention.page_memory import BytesOfPages
from engine.host_tier.peers import PageReading

_STOP_S = 5.0


class _Job(NamedTuple):
    number: int
    reading: PageReading
    wait: Callable[[], None]
    """Waits until the steps before have made their copies."""


class PartReader:
    """Reads in a thread of its own, beside the steps. Its methods belong to the thread that runs them."""

    def __init__(
        self,
        memory: BytesOfPages,
        report: Callable[[int, bytes | memoryview], None],
        fence: Callable[[], Callable[[], None]],
    ) -> None:
        """`report` is called in the thread with the number of a reading and the bytes. `fence` returns what waits
        until everything is done that the calling thread has had the device do.
        """
        self._memory, self._report, self._fence = memory, report, fence
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-parts", daemon=True)
        self._thread.start()

    def read(self, number: int, is_device: bool, page: int) -> None:
        """Begin to read a page, as it is after the steps before."""
        self._jobs.put(_Job(number, self._memory.reading(is_device, page), self._fence()))

    def write(self, page: int, data: memoryview) -> None:
        """Write a host page after the copies of the steps before, and before those of the next."""
        self._fence()()
        self._memory.write(page, data)

    def close(self) -> None:
        """End the thread; what waits is not read. Idempotent."""
        self._jobs.put(None)
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.wait()
            with contextlib.suppress(OSError):  # rank 0 has ended
                self._report(job.number, job.reading.take())
