"""Moves the parts of pages that ranks after the first have: each moves its own files when the first one asks.

    rank 0   PageMover ── WritePage, ReadPage ──▶ RankPages   another rank: a thread for each direction
                       ◀──── MovedPage ─────────

These messages are in one order with the steps, whose copies fill and read the same host pages.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.kv_tier.page_file import RankFiles, SpoiltFile

logger = logging.getLogger(__name__)

_STOP_S = 5.0


class Moved(NamedTuple):
    """A rank's part of a page was written or read, or this failed."""

    is_write: bool
    page: int
    """The host page."""
    is_done: bool


class _Job(NamedTuple):
    key: bytes
    page: int
    blocks: Sequence[int]
    wait: Callable[[], None]
    """Waits until the earlier steps have made their copies."""


class RankPages:
    """Moves one rank's parts. `write` and `read` belong to the thread that runs its steps."""

    def __init__(
        self,
        files: RankFiles,
        memory: Callable[[int], memoryview],
        report: Callable[[Moved], None],
        fence: Callable[[], Callable[[], None]],
    ) -> None:
        """`memory` returns that of a host page. `report` is called in any thread. `fence` returns a function
        that waits for all work that this thread has launched on the device.
        """
        self._files, self._memory, self._report, self._fence = files, memory, report, fence
        self._to_write: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(jobs, is_write), name=f"kv-{name}", daemon=True)
            for jobs, is_write, name in ((self._to_write, True, "writer"), (self._to_read, False, "reader"))
        ]
        for thread in self._threads:
            thread.start()

    def write(self, key: bytes, page: int, blocks: Sequence[int]) -> None:
        """Begin to write a host page."""
        self._to_write.put(_Job(key, page, blocks, self._fence()))

    def read(self, key: bytes, page: int) -> None:
        """Begin to read a page into a host page."""
        self._to_read.put(_Job(key, page, (), self._fence()))

    def close(self) -> None:
        """End the threads; waiting pages are not moved. Idempotent."""
        self._is_closed = True
        self._to_write.put(None)
        self._to_read.put(None)
        for thread in self._threads:
            thread.join(_STOP_S)

    def _run(self, jobs: queue.SimpleQueue[_Job | None], is_write: bool) -> None:
        while (job := jobs.get()) is not None and not self._is_closed:
            moved = Moved(is_write, job.page, self._move(job, is_write))
            with contextlib.suppress(OSError):  # Rank 0 has ended.
                self._report(moved)

    def _move(self, job: _Job, is_write: bool) -> bool:
        try:
            job.wait()
            if is_write:
                self._files.write(job.key, self._memory(job.page), job.blocks)
            else:
                self._files.read(job.key, self._memory(job.page))
        except (OSError, SpoiltFile) as error:
            if not isinstance(error, FileNotFoundError):
                logger.warning("KV in %s: %s", self._files.directory, error)
            return False
        return True
