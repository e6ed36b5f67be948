"""Runs one batch from its present state to its end. If a run is killed at any point, the next one continues it.

validating      the file is read, and every problem is reported
in_progress     its requests are sent, and their answers appended to a partial output
finalizing      the answers become two files, under names that the record already has
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Literal

from deployments.batch.errors import BatchFileError, BatchStopped
from deployments.batch.file_batch import BatchProgress, answer_rest
from deployments.batch.in_thread import in_thread
from deployments.batch.input_file import BatchFile
from deployments.batch.output_file import OutputError, PartialOutput
from deployments.batch.runner import BatchRunner, Post
from deployments.batch.spool import SpoolFull, TenantFolder
from deployments.batch.stored_batches import BatchRecord, Claim, LineProblem
from deployments.batch.stored_files import StoredFiles, new_file_id
from deployments.batch.validation import find_problems
from deployments.config.settings import BatchSettings

logger = logging.getLogger(__name__)
_STEP_BYTES = 2**20
"""A batch continues when there is room for so many bytes of answers, so that few are computed in vain."""
_UNANSWERED_BYTES = 256
"""Bytes written for a request without an answer, except for its name."""

Outcome = Literal["completed", "cancelled", "expired"]
_UNANSWERED = {
    "completed": OutputError("no_reply", "This request got no answer."),
    "cancelled": OutputError("batch_cancelled", "The batch was cancelled before this request was answered."),
    "expired": OutputError(
        "batch_expired", "This request was not answered before the completion window of the batch ended."
    ),
}


class BatchRun:
    """This process's work on one batch. Lives on one event loop; files are read and written in threads."""

    def __init__(
        self, claim: Claim, folder: TenantFolder, post: Post | None, settings: BatchSettings, max_line_bytes: int
    ) -> None:
        """Without `post`, nothing is sent: the batch can only be cancelled or expire."""
        self._claim, self._folder, self._post = claim, folder, post
        self._settings, self._max_line_bytes = settings, max_line_bytes
        self._runner: BatchRunner | None = None
        self.is_leaving = False
        """Whether it only completes requests in flight, and leaves the rest to a later run."""
        self._news = asyncio.Event()
        self._saved: tuple[int, int, int] | None = None

    @property
    def record(self) -> BatchRecord:
        """The batch's present record."""
        return self._claim.record

    def look(self) -> None:
        """Check immediately whether the batch was cancelled or has expired."""
        self._news.set()

    def leave(self) -> None:
        """Send no more requests. The run ends when those in flight are answered."""
        self.is_leaving = True
        if self._runner is not None:
            self._runner.leave()

    async def run(self) -> bool:
        """Work on the batch. Return whether it has ended; False means that it must be retried later."""
        try:
            if self.record.status == "validating":
                await self._validate()
            if self.record.status == "in_progress":
                outcome = await self._answer()
                if outcome is None:
                    return False
                self.record.status, self.record.outcome = "finalizing", outcome
                self.record.finalizing_at = self._now()
                self.record.output_file_id, self.record.error_file_id = new_file_id(), new_file_id()
                await in_thread(self._claim.save)
            if self.record.status == "finalizing":
                await in_thread(self._finalize)
        except BatchFileError as error:
            logger.error("batch %s cannot continue: %s", self.record.id, error)
            message = "The server's files of this batch cannot be read; send the batch again."
            await in_thread(self._fail, [LineProblem("unreadable", message)])
        return True

    async def _validate(self) -> None:
        most = self._folder.settings.max_requests
        args = self._claim.input, self.record.endpoint, most, self._max_line_bytes
        try:
            problems = await in_thread(find_problems, *args)
        except OSError as error:
            raise BatchFileError(f"{self._claim.input} cannot be read: {error.strerror}") from None
        if problems:
            await in_thread(self._fail, problems)
            return
        self.record.status, self.record.in_progress_at = "in_progress", self._now()
        await in_thread(self._claim.save)

    async def _answer(self) -> Outcome | None:
        """Send the remaining requests. Return why this ended; None if it must continue later."""
        if self._post is None and await self._due() is None:
            return None
        batch = await in_thread(BatchFile, self._claim.input, self._max_line_bytes)
        output = await in_thread(PartialOutput, batch, self._claim.answers)
        try:
            outcome = await self._due()
            if outcome is None:
                step = min(_STEP_BYTES, self._folder.settings.max_total_bytes // 16)
                await in_thread(self._reserve, batch, output.num_bytes + step)
                outcome = await self._send(batch, output)
            self.record.errors = []
        except SpoolFull as error:
            await self._wait_for_room(error)
            return None
        else:
            self.record.total, self.record.completed = batch.num_lines, output.num_ok
            if outcome == "completed":
                self.record.failed = batch.num_lines - output.num_ok
            return outcome
        finally:
            await in_thread(output.__exit__)

    async def _send(self, batch: BatchFile, output: PartialOutput) -> Outcome | None:
        assert self._post is not None, "without it, the batch was due"
        fields = {"priority": self._settings.priority}
        self._runner = runner = BatchRunner(self._post, self._settings)
        if self.is_leaving:
            return None
        reserve = partial(self._reserve, batch)
        sending = asyncio.create_task(answer_rest(batch, output, runner, fields, self._note, reserve))
        try:
            while True:
                self._news.clear()
                if (outcome := await self._due()) is not None:
                    return outcome
                await self._save_counts()
                news = asyncio.create_task(self._news.wait())
                try:
                    await asyncio.wait(
                        [sending, news],
                        timeout=self._folder.settings.poll_s,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
                    news.cancel()
                if sending.done():
                    outcome = _ended(sending)
                    return None if self.is_leaving else outcome
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def _reserve(self, batch: BatchFile, num_bytes: int) -> None:
        """Reserve room for answers of so many bytes, for the two sorted files at the end, and for the lines of
        requests without an answer. Raises SpoolFull.
        """
        unanswered = batch.path.stat().st_size + _UNANSWERED_BYTES * batch.num_lines
        self._claim.reserve(self._folder, 2 * num_bytes + unanswered)

    async def _wait_for_room(self, error: SpoolFull) -> None:
        """Record why the batch does not continue, for clients to see; it is retried until it expires."""
        if not self.record.errors:
            logger.warning("batch %s waits: %s", self.record.id, error)
        self.record.errors = [LineProblem("storage_full", f"The batch waits for room: {error}")]
        await in_thread(self._claim.save)

    async def _due(self) -> Outcome | None:
        """Return why the batch must end before all requests are answered, if it must."""
        asked_at = await in_thread(self._claim.cancelled_at)
        if asked_at is not None:
            self.record.cancelling_at = asked_at
            return "cancelled"
        return "expired" if self.record.expires_at <= self._folder.clock() else None

    async def _save_counts(self) -> None:
        """Save the batch's progress, for clients to see."""
        counts = self.record.total, self.record.completed, self.record.failed
        if counts != self._saved:
            self._saved = counts
            await in_thread(self._claim.save)

    def _note(self, progress: BatchProgress) -> None:
        self.record.total = progress.total
        self.record.completed, self.record.failed = progress.num_ok, progress.num_failed

    def _finalize(self) -> None:
        record, files, folder = self.record, StoredFiles(self._folder), self._claim.folder
        assert record.outcome is not None
        batch = BatchFile(self._claim.input, self._max_line_bytes)
        written = folder / "output.tmp", folder / "errors.tmp"
        with PartialOutput(batch, self._claim.answers) as output:
            counts = output.split(*written, _UNANSWERED[record.outcome])
        names = [record.output_file_id, record.error_file_id]
        for at, what in enumerate(("output", "error")):
            if counts[at]:
                filename = f"{record.id}_{what}.jsonl"
                name = names[at] or new_file_id()
                files.publish(written[at], name, filename, "batch_output", record.output_ttl_s)
            else:
                names[at] = None
        record.output_file_id, record.error_file_id = names
        record.status, record.ended_at = record.outcome, self._now()
        self._claim.save()
        self._claim.clear()

    def _fail(self, problems: list[LineProblem]) -> None:
        self.record.errors, self.record.status, self.record.ended_at = problems, "failed", self._now()
        self._claim.save()
        self._claim.clear()

    def _now(self) -> int:
        return int(self._folder.clock())


def _ended(sending: asyncio.Task[BatchProgress]) -> Outcome | None:
    error = sending.exception()
    if isinstance(error, BatchStopped):
        logger.warning("a batch is tried again later: %s", error)
        return None
    if error is not None:
        raise error
    return "completed"


PostFor = Callable[[str], Post | None]
"""Returns the function that sends a tenant's requests; None while they cannot be sent."""
