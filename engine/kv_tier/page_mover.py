"""Threads that write pages of host memory to files and read them back, while the engine's steps run.

    engine's thread ── save ──▶ writer ──▶ PageFiles
                    ── load ──▶ reader ◀──
                    ◀─ finished: pages saved, loaded, or not loadable

The caller leaves a page's memory untouched until the page is finished. If a model has several ranks, each moves
its own part, and a page is finished when all have.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from cache.news.store_log import StoreLog
from engine.host_tier.lower_tier import Finished, TierTotals
from engine.kv_tier.page_files import PageFiles
from engine.kv_tier.rank_pages import Moved

logger = logging.getLogger(__name__)

_SMOOTHING = 0.1
_SCAN_SHARE = 1 / 20
"""Largest share of the writer's time for scans of the directory."""
_STOP_S = 5.0
_LEARNED = 64
"""Files whose blocks are read between writing two pages."""


class OtherRanks(Protocol):
    """The ranks after the first, which move their own parts of pages."""

    @property
    def size(self) -> int:
        """Number of ranks, including the first one."""

    def write_page(self, key: bytes, page: int, blocks: Sequence[int]) -> None:
        """Let the others write a host page."""

    def read_page(self, key: bytes, page: int) -> None:
        """Let the others read a page into a host page."""

    def on_moved(self, call: Callable[[Moved], None]) -> None:
        """Call `call`, in any thread, with each part that another rank has moved or failed to move."""


class _Parts:
    """A page with parts that some ranks are still moving."""

    __slots__ = ("blocks", "is_whole", "key", "left")

    def __init__(self, key: bytes, blocks: Sequence[int], left: int) -> None:
        self.key, self.blocks, self.left, self.is_whole = key, blocks, left, True


class PageMover:
    """Moves pages between files and the memory of host pages, one thread for each direction."""

    def __init__(
        self,
        files: PageFiles,
        memory: Callable[[int], memoryview],
        page_bytes: int,
        *,
        max_queued: int,
        rescan_s: float,
        retry_s: float,
        expected_bytes_per_s: float,
    ) -> None:
        """`memory` returns that of a host page. At most `max_queued` pages wait to be written.
        `page_seconds` is computed from `expected_bytes_per_s` until a page was loaded.
        """
        self._files, self._memory, self._page_bytes = files, memory, page_bytes
        self._max_queued, self._rescan_s, self._retry_s = max_queued, rescan_s, retry_s
        self._expected_s = page_bytes / expected_bytes_per_s
        self._to_save: queue.SimpleQueue[tuple[bytes, int, Sequence[int]] | None] = queue.SimpleQueue()
        self._to_load: queue.SimpleQueue[tuple[bytes, int] | list[bytes] | None] = queue.SimpleQueue()
        self._forgotten: deque[bytes] = deque()
        self._moved: deque[Moved] = deque()
        self._others: OtherRanks | None = None
        self._saving: dict[int, _Parts] = {}  # by host page, like the next
        self._loading: dict[int, _Parts] = {}
        self._num_saved = self._num_loaded = self._num_failed = self._num_skipped = 0
        self._measured_s = 0.0  # seconds per page; 0 until one was loaded
        self._broken_until = 0.0
        self._is_closed = False
        self._on_finished: Callable[[], None] = lambda: None
        self._threads = [
            threading.Thread(target=target, name=f"kv-{name}", daemon=True)
            for name, target in (("writer", self._write), ("reader", self._read))
        ]
        for thread in self._threads:
            thread.start()

    def join(self, others: OtherRanks) -> None:
        """Let the other ranks move their parts as well. Call it before any page is moved."""
        self._others = others
        others.on_moved(self._take_part)

    def _take_part(self, moved: Moved) -> None:
        self._moved.append(moved)
        self._on_finished()

    # --- from the engine's thread --------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether there is no file at all."""
        return not len(self._files)

    @property
    def store(self) -> str:
        """Name of the directory."""
        return self._files.name

    @property
    def log(self) -> StoreLog:
        """The blocks that are in files."""
        return self._files.log

    @property
    def page_seconds(self) -> float:
        """Seconds to load a page, as measured, or as expected before."""
        return self._measured_s or self._expected_s

    def has(self, key: bytes) -> bool:
        """Whether the page is in a file."""
        return self._files.has(key)

    @property
    def has_room(self) -> bool:
        """Whether another page may wait to be written."""
        return len(self._saving) < self._max_queued

    def save(self, key: bytes, page: int, blocks: Sequence[int]) -> bool:
        """Begin to write a host page; False if the disk has failed or already has it."""
        if self._files.has(key):
            self._files.use([key])
            return False
        if time.monotonic() < self._broken_until:
            self._num_skipped += 1
            return False
        self._saving[page] = _Parts(key, blocks, self._num_ranks)
        if self._others is not None:
            self._others.write_page(key, page, blocks)
        self._to_save.put((key, page, blocks))
        return True

    @property
    def _num_ranks(self) -> int:
        return 1 if self._others is None else self._others.size

    def load(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Begin to read pages into host pages, in this order."""
        for key, page in pages:
            self._loading[page] = _Parts(key, (), self._num_ranks)
            if self._others is not None:
                self._others.read_page(key, page)
            self._to_load.put((key, page))
        self._to_load.put([key for key, _ in reversed(pages)])  # used, so that a prefix's end is deleted first

    def seconds(self, num_pages: int) -> float:
        """Predict the seconds until `num_pages` more are loaded; 0 until one was."""
        return (len(self._loading) + num_pages) * self._measured_s

    def finished(self) -> Finished:
        """Return the transfers that ended since the last call."""
        saved: list[int] = []
        loaded: list[int] = []
        failed: list[int] = []
        for _ in range(len(self._moved)):
            is_write, page, is_done = self._moved.popleft()
            under_way = self._saving if is_write else self._loading
            parts = under_way[page]
            parts.left -= 1
            parts.is_whole &= is_done
            if parts.left:
                continue
            del under_way[page]
            if self._others is not None:
                self._end(parts, is_write)
            (saved if is_write else loaded if parts.is_whole else failed).append(page)
        return Finished(saved, loaded, failed)

    def _end(self, parts: _Parts, is_write: bool) -> None:
        """Finish a page of several ranks; if a part failed, delete the whole page."""
        if not parts.is_whole:
            self._files.forget(parts.key)
            self._forgotten.append(parts.key)
            self._to_save.put(None)
        elif is_write:
            self._files.add(parts.key, parts.blocks)

    def on_finished(self, call: Callable[[], None]) -> None:
        """Call `call`, in a thread, when pages were loaded or all were saved."""
        self._on_finished = call

    def totals(self) -> TierTotals:
        """Count the pages moved since the start."""
        return TierTotals(
            self._num_saved,
            self._num_loaded,
            self._num_failed,
            self._num_skipped,
            self._page_bytes,
            len(self._files),
            self._files.num_bytes,
        )

    def clear(self) -> None:
        """Forget all files, except those that are being written; the writer deletes them before anything else."""
        self._forgotten += self._files.forget_all()
        self._to_save.put(None)

    def close(self) -> None:
        """End the threads; waiting pages are not written. Idempotent."""
        self._is_closed = True
        self._to_save.put(None)
        self._to_load.put(None)
        for thread in self._threads:
            thread.join(_STOP_S)

    # --- the threads ---------------------------------------------------------------------------------------

    def _write(self) -> None:
        scan_at, is_more = time.monotonic() + self._rescan_s, True
        while not self._is_closed:
            try:
                job = self._to_save.get(timeout=0.0 if is_more else max(0.0, scan_at - time.monotonic()))
            except queue.Empty:
                job = None
            while self._forgotten and not self._is_closed:
                self._files.delete(self._forgotten.popleft())
            if job is not None:
                self._moved.append(Moved(True, job[1], self._write_page(*job)))
                if self._to_save.empty():
                    self._on_finished()
            is_more = self._files.learn_blocks(_LEARNED)
            if (began := time.monotonic()) >= scan_at:
                self._files.scan()
                is_more = True
                now = time.monotonic()
                scan_at = now + max(self._rescan_s, (now - began) / _SCAN_SHARE)

    def _write_page(self, key: bytes, page: int, blocks: Sequence[int]) -> bool:
        if time.monotonic() < self._broken_until:
            self._num_skipped += 1
            return False
        try:
            is_written = self._files.write(key, self._memory(page), blocks)
            self._num_saved += is_written
            return is_written
        except OSError as error:
            self._broken_until = time.monotonic() + self._retry_s
            self._num_skipped += 1
            logger.warning(
                "cannot write KV to %s, so nothing is written for %g s: %s",
                self._files.directory,
                self._retry_s,
                error,
            )
        return False

    def _read(self) -> None:
        while (job := self._to_load.get()) is not None and not self._is_closed:
            if isinstance(job, list):  # the last of the pages that were requested together
                self._files.use(job)
                if self._to_load.empty():
                    self._on_finished()
                continue
            key, page = job
            began = time.monotonic()
            is_read = self._files.read(key, self._memory(page))
            if is_read:
                self._num_loaded += 1
                seconds = time.monotonic() - began
                self._measured_s += (seconds - self._measured_s) * (_SMOOTHING if self._measured_s else 1.0)
            else:
                self._num_failed += 1
            self._moved.append(Moved(False, page, is_read))
            if not is_read:
                self._on_finished()
