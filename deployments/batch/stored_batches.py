"""Batches that clients have left with the server, and the process that works on each.

    validating ─▶ in_progress ─▶ finalizing ─▶ completed, expired, cancelled
        └─▶ failed

Only the holder of a batch's lock changes its record. Other processes leave a mark when it should be cancelled.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import BinaryIO

import msgspec

from deployments.batch.spool import (
    ABSENT,
    INPUT,
    RESERVED,
    SpoolFull,
    TenantFolder,
    entries,
    lock,
    read_record,
    remove,
    write_record,
)
from engine.base.files import PRIVATE_FOLDER, new_file, open_or_create, open_regular, read_bytes

BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system without links, or with too many."""
STATE, ANSWERS, LOCK, CANCEL = "state.json", "answers.jsonl", "lock", "cancel"


class LineProblem(msgspec.Struct):
    """The reason why a file is no batch, in OpenAI's form."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct):
    """The state of a batch. Times are Unix seconds."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    metadata: dict[str, str] | None = None
    output_ttl_s: float | None = None
    """Seconds for which its files are kept; None: as long as any file."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[LineProblem] = []
    outcome: str | None = None
    """The status that follows `finalizing`."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    ended_at: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether its state is final."""
        return self.status in ENDED


class Claim:
    """A batch that only this process works on. Close it at the end."""

    def __init__(self, folder: Path, record: BatchRecord, held: BinaryIO) -> None:
        self.folder, self.record, self._held = folder, record, held

    @property
    def input(self) -> Path:
        """The file of requests."""
        return self.folder / INPUT

    @property
    def answers(self) -> Path:
        """Path of the answers (`PartialOutput`)."""
        return self.folder / ANSWERS

    def reserve(self, folder: TenantFolder, num_bytes: int) -> None:
        """Reserve room for all files here except the record. Raises SpoolFull."""
        with folder.locked(), open_or_create(self.folder / RESERVED) as held:
            before = os.fstat(held.fileno()).st_size
            if num_bytes > before:
                folder.check_room(num_bytes - before)
                held.truncate(num_bytes)

    def save(self) -> None:
        """Write the record."""
        write_record(self.folder / STATE, self.record)

    def cancelled_at(self) -> int | None:
        """Return when a client requested its end; None if no client has."""
        return _cancelled_at(self.folder)

    def clear(self) -> None:
        """Remove all files except the record of a batch that has ended."""
        for path in entries(self.folder):
            if path.name not in (STATE, LOCK):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release it for other processes. Idempotent."""
        self._held.close()


class StoredBatches:
    """The batches of one tenant. Methods read and write, so they are called in threads."""

    def __init__(self, folder: TenantFolder) -> None:
        self._folder = folder

    def create(self, record: BatchRecord, content: Path) -> None:
        """Keep a new batch with the requests in `content`. Raises SpoolFull, or OSError if that is gone."""
        with self._folder.locked():
            self._make_room()
            self._create(self._folder.batches / record.id, record, content)

    def _create(self, place: Path, record: BatchRecord, content: Path) -> None:
        place.mkdir(mode=PRIVATE_FOLDER)
        try:
            try:
                os.link(content, place / INPUT)  # deleting the file then does not affect the batch
            except FileNotFoundError:
                raise
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                with open_regular(content) as source, new_file(place / INPUT) as target:
                    shutil.copyfileobj(source, target)
            write_record(place / STATE, record)
        except BaseException:
            remove(place)
            raise

    def find(self, name: str) -> BatchRecord | None:
        """Return a batch's present record."""
        if not BATCH_ID.fullmatch(name):
            return None
        place = self._folder.batches / name
        record = read_record(place / STATE, BatchRecord)
        if record is not None and not record.has_ended and (asked_at := _cancelled_at(place)) is not None:
            record.status, record.cancelling_at = "cancelling", asked_at
        return record

    def all(self) -> list[BatchRecord]:
        """Return all batches, the newest first."""
        found = [self.find(path.name) for path in entries(self._folder.batches)]
        known = [record for record in found if record is not None]
        return sorted(known, key=lambda record: (record.created_at, record.id), reverse=True)

    def cancel(self, name: str) -> None:
        """Leave the mark that a batch should end."""
        place = self._folder.batches / name
        with contextlib.suppress(FileExistsError, FileNotFoundError), new_file(place / CANCEL) as file:
            file.write(str(int(self._folder.clock())).encode())

    def claim(self, name: str) -> Claim | None:
        """Claim a batch that has not ended and that no process works on."""
        place = self._folder.batches / name
        try:
            held = lock(place / LOCK)
        except OSError:
            return None
        if held is None:
            return None
        try:
            record = read_record(place / STATE, BatchRecord)
        except OSError:
            record = None
        if record is None or record.has_ended or record.id != name:
            held.close()
            return None
        return Claim(place, record, held)

    def sweep(self) -> None:
        """Remove batches that ended long ago."""
        for record in self.all():
            ended_at, keep_s = record.ended_at, self._folder.settings.keep_s
            if ended_at is not None and ended_at + keep_s <= self._folder.clock():
                self._forget(record.id)

    def _make_room(self) -> None:
        most, found = self._folder.settings.max_batches, self.all()
        ended = [record for record in found if record.has_ended]
        while len(found) >= most:
            if not ended:
                raise SpoolFull(
                    f"{len(found)} batches have not ended, the limit (files.max_batches); wait for one, or "
                    "cancel one."
                )
            oldest = ended.pop()
            self._forget(oldest.id)
            found.remove(oldest)

    def _forget(self, name: str) -> None:
        remove(self._folder.batches / name)


def new_batch_id() -> str:
    """Return the name of a new batch."""
    return f"batch_{secrets.token_hex(16)}"


def _cancelled_at(place: Path) -> int | None:
    try:
        text = read_bytes(place / CANCEL, 32)
        return int(text) if text.isdigit() else int((place / CANCEL).stat().st_mtime)
    except ABSENT:
        return None
