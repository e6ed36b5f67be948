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
    """What is known of a file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int


class Upload:
    """A file that is arriving. It is nobody's until it is kept; close it in any case. Used in threads.

    It is as long as what is reserved for it, so that others count that as taken. What is not written yet is a
    hole.
    """

    def __init__(self, folder: TenantFolder, path: Path, file: BinaryIO) -> None:
        self.path, self._folder, self._file = path, folder, file
        self.num_bytes = self._num_reserved = 0

    def reserve(self, num_bytes: int) -> None:
        """Have room for so many bytes in all. Raises SpoolFull."""
        with self._folder.alone():
            self._folder.check_room(num_bytes - self._num_reserved)
            self._file.truncate(num_bytes)
        self._num_reserved = num_bytes

    def write(self, data: bytes) -> None:
        """Add to its end. Raises SpoolFull."""
        size = self.num_bytes + len(data)
        if size > self._num_reserved:
            self._reserve_more(size)
        self._file.write(data)
        self.num_bytes = size

    def _reserve_more(self, size: int) -> None:
        try:
            self.reserve(size + min(size, _STEP_BYTES))  # counting what a tenant has takes time
        except SpoolFull:
            self.reserve(size)

    def sync(self) -> None:
        """Have all that was written survive this machine, and give back what else was reserved."""
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
        """Raise SpoolFull where there are as many files as may be, those that are arriving included."""
        most = self._folder.settings.max_files
        if len(entries(self._folder.files)) + len(entries(self._folder.uploads)) > most:
            raise SpoolFull(f"There are {most} files, as many as are kept (files.max_files); delete some.")

    def begin(self, num_bytes: int = 1) -> Upload:
        """Begin to take a file that has about so many bytes. Raises SpoolFull where there is no room for them."""
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
            # Locked, nobody takes it for what a dead process has left; a sweep may have come between.
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
        """Make a file of `content`, which lies in the spool and is moved. Doing it again changes nothing."""
        now = int(self._folder.clock())
        expires_at = now + int(self._folder.settings.keep_s if ttl_s is None else ttl_s)
        place = self._folder.files / name
        make_folder(place)
        record = FileRecord(name, content.stat().st_size, now, filename, purpose, expires_at)
        with self._folder.alone():  # while it moves, whoever counts what is taken could miss it
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
        """Return where the content of a file lies that was found."""
        return self._folder.files / name / CONTENT

    def all(self) -> list[FileRecord]:
        """Return all files that have not expired, the oldest first."""
        found = [self.find(path.name) for path in entries(self._folder.files)]
        return sorted((file for file in found if file is not None), key=lambda file: (file.created_at, file.id))

    def delete(self, name: str) -> bool:
        """Delete a file; return whether there was one. A batch that reads it has its content all the same."""
        is_there = self.find(name) is not None
        if is_there:
            (self._folder.files / name / ABOUT).unlink(missing_ok=True)
            remove(self._folder.files / name)
        return is_there

    def sweep(self) -> None:
        """Delete what has expired, and uploads of processes that died."""
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
