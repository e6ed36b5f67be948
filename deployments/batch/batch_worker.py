"""Works on the batches of a spool, together with other processes: each batch has one owner at a time.

An owner that dies releases its locks, and the next process that looks continues where the answers end.

Tenants share the places of a process (`files.max_running`). A tenant may have all of them while no other tenant
has a waiting batch. If another has, the tenant with most places gives one back: one of its batches completes the
requests in flight, and continues later. More tenants than places take turns, so none waits for the end of
another's batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deployments.batch.batch_run import BatchRun, PostFor
from deployments.batch.spool import Spool, entries, read_record
from deployments.batch.stored_batches import STATE, BatchRecord, StoredBatches
from deployments.batch.stored_files import StoredFiles
from deployments.config.settings import BatchSettings

logger = logging.getLogger(__name__)

SWEEP_S = 60.0
"""Seconds between two searches for expired files and batches."""
TURN_S = 30.0
"""Seconds for which a tenant with one place keeps it although others have none."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A batch that this process works on."""

    run: BatchRun
    task: asyncio.Task[None]
    since: float
    """The loop's time at which it began."""

    @property
    def tenant(self) -> str:
        """The owner of the batch."""
        return self.run.record.tenant


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
        """`post_for` returns how a tenant's requests are sent. Once `is_stopping`, batches are left to others."""
        self._spool, self._settings, self._post_for = spool, settings, post_for
        self.max_line_bytes, self._is_stopping = max_line_bytes, is_stopping
        self._places: dict[str, _Place] = {}
        self._last_turns: dict[str, float] = {}  # tenant -> when it last received a place
        self._ended: set[str] = set()  # batches that need not be read again
        self._news = asyncio.Event()
        self._swept_at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for batches."""
        self._spool.changed = self.look
        self._task = asyncio.create_task(self._work())

    def look(self) -> None:
        """Look immediately, because something has changed."""
        self._news.set()
        for place in self._places.values():
            place.run.look()

    async def aclose(self) -> None:
        """Release all batches for other processes. Idempotent."""
        self._spool.changed = lambda: None
        tasks = [task for task in (self._task, *self._tasks()) if task is not None]
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
                logger.error("batches cannot be listed: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._spool.settings.poll_s):
                    await self._news.wait()
        for task in self._tasks():
            task.cancel()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [place.task for place in self._places.values()]

    async def _take_more(self) -> None:
        """Claim batches that no process works on, the tenants in turn, while there are places for them."""
        waiting = [record for record in await asyncio.to_thread(self._waiting) if record.id not in self._places]
        while waiting:
            num_places = Counter(place.tenant for place in self._staying())
            record = min(waiting, key=lambda found: (*self._turn(num_places, found), found.created_at, found.id))
            waiting.remove(record)
            held = sum(place.tenant == record.tenant for place in self._places.values())
            if held >= self._spool.settings.max_running:
                continue  # It must first complete the requests in flight of the batch that it gave back.
            leaves = None
            if num_places.total() >= self._spool.settings.max_running:
                leaves = self._to_leave(num_places, record.tenant)
                if leaves is None:
                    return
            if await self._take(record) and leaves is not None:
                leaves.run.leave()

    def _turn(self, num_places: Counter[str], record: BatchRecord) -> tuple[int, float]:
        """Return a sort key: first those with fewest places, then those whose last turn was longest ago."""
        return num_places[record.tenant], self._last_turns.get(record.tenant, -math.inf)

    def _staying(self) -> list[_Place]:
        return [place for place in self._places.values() if not place.run.is_leaving]

    def _to_leave(self, num_places: Counter[str], tenant: str) -> _Place | None:
        """Return the place that a tenant receives when all are taken; None: it must wait."""
        staying = self._staying()
        if len(self._places) >= 2 * len(staying):
            return None  # Half of them only complete requests in flight, so these are bounded, too.
        place = max(staying, key=lambda found: (num_places[found.tenant], -found.since))
        lead = num_places[place.tenant] - num_places[tenant]
        has_had_its_turn = asyncio.get_running_loop().time() - place.since >= TURN_S
        return place if lead > 1 or (lead == 1 and has_had_its_turn) else None

    async def _take(self, record: BatchRecord) -> bool:
        """Begin to work on a batch; False if another process owns it."""
        folder = self._spool.of(record.tenant)
        claim = await asyncio.to_thread(StoredBatches(folder).claim, record.id)
        if claim is None:
            return False
        run = BatchRun(claim, folder, self._post_for(record.tenant), self._settings, self.max_line_bytes)

        async def work() -> None:
            try:
                if await run.run():
                    logger.info("batch %s has ended: %s", record.id, run.record.status)
            except Exception:
                logger.exception("batch %s is tried again later", record.id)
            finally:
                claim.close()
                del self._places[record.id]
            if run.record.has_ended or run.is_leaving:
                self._news.set()

        now = asyncio.get_running_loop().time()
        self._last_turns[record.tenant] = now
        self._places[record.id] = _Place(run, asyncio.create_task(work()), now)
        return True

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
                logger.error("expired files in %s cannot be removed: %s", folder.path, error)


def _read(place: Path) -> BatchRecord | None:
    """Return a batch's record. If it cannot be read now, other batches continue."""
    try:
        return read_record(place / STATE, BatchRecord)
    except OSError as error:
        logger.error("the batch %s cannot be read: %s", place.name, error)
        return None
