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
from engine.files import make_folder

FILE_ID = re.compile(r"file-[0-9a-f]{32}")
ABOUT, CONTENT = "about.json", "content"


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
    """A file that is arriving. It is nobody's until it is kept; close it in any case. Used in threads."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        """Add to its end."""
        self._file.write(data)
        self.num_bytes += len(data)

    def sync(self) -> None:
        """Have all that was written survive this machine."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Remove it, unless it was kept. Idempotent."""
        self.path.unlink(missing_ok=True)
        self._file.close()


class StoredFiles:
    """The files of one tenant. Methods read and write, so they are called in threads."""

    def __init__(self, folder: TenantFolder) -> None:
        self._folder = folder

    def room(self, taken: int = 0) -> int:
        """Return how many bytes a new file may have. Raises SpoolFull where there may be none.

        With `taken`, the file is there, and its bytes have to fit.
        """
        settings = self._folder.settings
        if len(entries(self._folder.files)) >= settings.max_files:
            raise SpoolFull(
                f"There are {settings.max_files} files, as many as are kept (files.max_files); delete some."
            )
        room = settings.max_total_bytes - self._folder.num_bytes()
        if room + taken <= 0:
            raise SpoolFull(
                f"The files and batches have {settings.max_total_bytes} bytes, as many as are kept "
                "(files.max_total_bytes); delete some files."
            )
        return room

    def begin(self) -> Upload:
        """Begin to take a file."""
        while True:
            self._folder.make()
            path = self._folder.uploads / secrets.token_hex(16)
            # Locked, nobody takes it for what a dead process has left; a sweep may have come between.
            with contextlib.suppress(FileNotFoundError):
                if (file := lock(path)) is not None:
                    return Upload(path, file)

    def keep(self, upload: Upload, filename: str, purpose: str, ttl_s: float | None) -> FileRecord:
        """Keep an upload as a file. Raises SpoolFull where others have taken its room meanwhile."""
        upload.sync()
        self.room(taken=1)
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
