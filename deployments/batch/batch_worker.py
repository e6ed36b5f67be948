"""Works on the batches of a spool, beside other processes that do the same: each batch has one owner at a time.

An owner that dies leaves its locks, and the next process that looks goes on where the answers end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from deployments.batch.batch_run import BatchRun, PostFor
from deployments.batch.spool import Spool, entries, read_record
from deployments.batch.stored_batches import STATE, BatchRecord, StoredBatches
from deployments.batch.stored_files import StoredFiles
from deployments.config.settings import BatchSettings

logger = logging.getLogger(__name__)

SWEEP_S = 60.0
"""Seconds between two searches for what has expired."""


class BatchWorker:
    """One process's share of the work. Lives on one event loop."""

    def __init__(
        self,
        spool: Spool,
        settings: BatchSettings,
        post_for: PostFor,
        max_line_bytes: int,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`post_for` returns how requests of a tenant are sent. Once `is_stopping`, batches are left to others."""
        self._spool, self._settings, self._post_for = spool, settings, post_for
        self.max_line_bytes, self._is_stopping = max_line_bytes, is_stopping
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._ended: set[str] = set()  # these need not be read again
        self._news = asyncio.Event()
        self._swept_at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for batches."""
        self._spool.changed = self.look
        self._task = asyncio.create_task(self._work())

    def look(self) -> None:
        """Look at once, as something has changed."""
        self._news.set()
        for run, _ in self._runs.values():
            run.look()

    async def aclose(self) -> None:
        """Leave all batches to others. Idempotent."""
        self._spool.changed = lambda: None
        tasks = [task for task in (self._task, *(task for _, task in self._runs.values())) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        while not self._is_stopping():
            self._news.clear()
            try:
                await self._take_more()
                await self._sweep()
            except OSError as error:
                logger.error("batches cannot be looked for: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._spool.settings.poll_s):
                    await self._news.wait()
        for _, task in self._runs.values():
            task.cancel()

    async def _take_more(self) -> None:
        """Take batches that nobody works on, those of tenants first of whom there are fewest here."""
        if len(self._runs) >= self._spool.settings.max_running:
            return
        waiting = [record for record in await asyncio.to_thread(self._waiting) if record.id not in self._runs]
        while waiting and len(self._runs) < self._spool.settings.max_running:
            here = Counter(run.record.tenant for run, _ in self._runs.values())
            record = min(waiting, key=lambda found: (here[found.tenant], found.created_at, found.id))
            waiting.remove(record)
            await self._take(record)

    async def _take(self, record: BatchRecord) -> None:
        folder = self._spool.of(record.tenant)
        claim = await asyncio.to_thread(StoredBatches(folder).claim, record.id)
        if claim is None:
            return
        run = BatchRun(claim, folder, self._post_for(record.tenant), self._settings, self.max_line_bytes)

        async def work() -> None:
            try:
                if await run.run():
                    logger.info("batch %s has ended: %s", record.id, run.record.status)
            except Exception:
                logger.exception("batch %s is tried again later", record.id)
            finally:
                claim.close()
                del self._runs[record.id]
            if run.record.has_ended:
                self._news.set()

        self._runs[record.id] = run, asyncio.create_task(work())

    def _waiting(self) -> list[BatchRecord]:
        """Return the batches of all tenants that have not ended."""
        found, ended = [], set()
        for folder in self._spool.folders():
            for path in entries(folder.batches):
                if path.name in self._ended:
                    ended.add(path.name)
                    continue
                record = _read(path)
                if record is None or self._spool.of(record.tenant).path != folder.path:
                    continue
                if record.has_ended:
                    ended.add(path.name)
                else:
                    found.append(record)
        self._ended = ended
        return found

    async def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._swept_at >= SWEEP_S:
            self._swept_at = now
            await asyncio.to_thread(self._sweep_all)

    def _sweep_all(self) -> None:
        for folder in self._spool.folders():
            try:
                StoredBatches(folder).sweep()
                StoredFiles(folder).sweep()
            except OSError as error:
                logger.error("what is too old in %s cannot be removed: %s", folder.path, error)


def _read(place: Path) -> BatchRecord | None:
    """Return a batch's record. One that cannot be read now holds up no other batch."""
    try:
        return read_record(place / STATE, BatchRecord)
    except OSError as error:
        logger.error("the batch %s cannot be read: %s", place.name, error)
        return None
