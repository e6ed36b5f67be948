"""Files that clients have uploaded, and those that batches have written for them."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path
from typing import BinaryIO

import msgspec

from deployments.batch.spool import SpoolFull, TenantFolder, entries, lock, read_record, remove, write_record
from engine.base.files import make_folder

FILE_ID = re.compile(r"file-[0-9a-f]{32}")
ABOUT, CONTENT = "about.json", "content"
_STEP_BYTES = 8 * 2**20


def new_file_id() -> str:
    """Return the name of a new file."""
    return f"file-{secrets.token_hex(16)}"


class FileRecord(msgspec.Struct):
    """The metadata of a file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int


class Upload:
    """An arriving file. It has no owner until it is kept; close it in any case. Used in threads.

    It is as long as the room reserved for it, so that the room counts as taken. The part that is not written yet
    is a hole.
    """

    def __init__(self, folder: TenantFolder, path: Path, file: BinaryIO) -> None:
        self.path, self._folder, self._file = path, folder, file
        self.num_bytes = self._num_reserved = 0

    def reserve(self, num_bytes: int) -> None:
        """Reserve so many bytes in total. Raises SpoolFull."""
        with self._folder.locked():
            self._folder.check_room(num_bytes - self._num_reserved)
            self._file.truncate(num_bytes)
        self._num_reserved = num_bytes

    def write(self, data: bytes) -> None:
        """Append data. Raises SpoolFull."""
        size = self.num_bytes + len(data)
        if size > self._num_reserved:
            self._reserve_more(size)
        self._file.write(data)
        self.num_bytes = size

    def _reserve_more(self, size: int) -> None:
        try:
            self.reserve(size + min(size, _STEP_BYTES))  # counting a tenant's bytes takes time
        except SpoolFull:
            self.reserve(size)

    def sync(self) -> None:
        """Make the written data survive a crash of this machine, and release the rest of the reserved room."""
        self._file.truncate(self.num_bytes)  # which writes first
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Remove it, unless it was kept. Idempotent."""
        self.path.unlink(missing_ok=True)
        self._file.close()


class StoredFiles:
    """The files of one tenant. Methods read and write, so they are called in threads."""

    def __init__(self, folder: TenantFolder) -> None:
        self._folder = folder

    def check_count(self) -> None:
        """Raise SpoolFull if the limit of files is reached, including those that are arriving."""
        most = self._folder.settings.max_files
        if len(entries(self._folder.files)) + len(entries(self._folder.uploads)) > most:
            raise SpoolFull(f"There are {most} files, the limit (files.max_files); delete some.")

    def begin(self, num_bytes: int = 1) -> Upload:
        """Begin to receive a file of about so many bytes. Raises SpoolFull if there is no room for them."""
        upload = self._begin()
        try:
            self.check_count()
            upload.reserve(num_bytes)
        except BaseException:
            upload.close()
            raise
        return upload

    def _begin(self) -> Upload:
        while True:
            self._folder.make()
            path = self._folder.uploads / secrets.token_hex(16)
            # While it is locked, it does not look like the file of a dead process; a sweep may have come between.
            with contextlib.suppress(FileNotFoundError):
                if (file := lock(path)) is not None:
                    return Upload(self._folder, path, file)

    def keep(self, upload: Upload, filename: str, purpose: str, ttl_s: float | None) -> FileRecord:
        """Keep an upload as a file."""
        upload.sync()
        name = new_file_id()
        try:
            return self.publish(upload.path, name, filename, purpose, ttl_s)
        except OSError:
            remove(self._folder.files / name)
            raise

    def publish(self, content: Path, name: str, filename: str, purpose: str, ttl_s: float | None) -> FileRecord:
        """Make a file of `content`, which is in the spool and is moved. Idempotent."""
        now = int(self._folder.clock())
        expires_at = now + int(self._folder.settings.keep_s if ttl_s is None else ttl_s)
        place = self._folder.files / name
        make_folder(place)
        record = FileRecord(name, content.stat().st_size, now, filename, purpose, expires_at)
        with self._folder.locked():  # A count of the used room could miss the file while it moves.
            content.replace(place / CONTENT)
        write_record(place / ABOUT, record)
        return record

    def find(self, name: str) -> FileRecord | None:
        """Return a file that has not expired."""
        if not FILE_ID.fullmatch(name):
            return None
        record = read_record(self._folder.files / name / ABOUT, FileRecord)
        return None if record is None or record.expires_at <= self._folder.clock() else record

    def content(self, name: str) -> Path:
        """Return the path of the content of a file that was found."""
        return self._folder.files / name / CONTENT

    def all(self) -> list[FileRecord]:
        """Return all files that have not expired, the oldest first."""
        found = [self.find(path.name) for path in entries(self._folder.files)]
        return sorted((file for file in found if file is not None), key=lambda file: (file.created_at, file.id))

    def delete(self, name: str) -> bool:
        """Delete a file; return whether there was one. A batch that reads it keeps its content."""
        is_there = self.find(name) is not None
        if is_there:
            (self._folder.files / name / ABOUT).unlink(missing_ok=True)
            remove(self._folder.files / name)
        return is_there

    def sweep(self) -> None:
        """Delete expired files, and uploads of processes that died."""
        for path in entries(self._folder.files):
            record = read_record(path / ABOUT, FileRecord)
            if record is not None and record.expires_at <= self._folder.clock():
                remove(path)
        for path in entries(self._folder.uploads):
            try:
                held = lock(path)
            except OSError:
                continue
            if held is not None:
                path.unlink(missing_ok=True)
                held.close()
