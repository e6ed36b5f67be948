"""Reads and writes a rank's part of pages that engines exchange, when the first rank asks for it."""

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
    """Waits until the earlier steps have made their copies."""


class PartReader:
    """Reads in a separate thread while steps run. Only the thread that runs the steps calls its methods."""

    def __init__(
        self,
        memory: BytesOfPages,
        report: Callable[[int, bytes | memoryview], None],
        fence: Callable[[], Callable[[], None]],
    ) -> None:
        """`report` is called in the thread with the number of a reading and the bytes. `fence` returns a function
        that waits for all work that the calling thread has launched on the device.
        """
        self._memory, self._report, self._fence = memory, report, fence
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-parts", daemon=True)
        self._thread.start()

    def read(self, number: int, is_device: bool, page: int) -> None:
        """Begin to read a page, as it is after the earlier steps."""
        self._jobs.put(_Job(number, self._memory.reading(is_device, page), self._fence()))

    def write(self, page: int, data: memoryview) -> None:
        """Write a host page after the copies of the earlier steps, and before those of the next."""
        self._fence()()
        self._memory.write(page, data)

    def close(self) -> None:
        """End the thread; waiting pages are not read. Idempotent."""
        self._jobs.put(None)
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.wait()
            with contextlib.suppress(OSError):  # Rank 0 has ended.
                self._report(job.number, job.reading.take())
