"""The directory of files and batches: it outlives the processes that work on it, and keeps them apart by locks.

    DIRECTORY/TENANT-1a2b3c4d/files/file-…/about.json, content
                              batches/batch_…/state.json, input.jsonl, answers.jsonl.partial, reserved,
                                             lock, cancel
                              uploads/…                      files that are still arriving
                              lock                           held while room is reserved

A record is replaced as a whole, and an unreadable one counts as missing. A lock belongs to the kernel, so it ends
with the process that holds it, for any reason. Any number of processes share a directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from deployments.config.files import FileSettings
from engine.base.files import NotRegular, TooLarge, make_folder, new_file, open_or_create, read_bytes

R = TypeVar("R")
ABSENT = (FileNotFoundError, NotADirectoryError, NotRegular, TooLarge)
"""Errors that mean that no file of ours has a name."""
_MAX_RECORD_BYTES = 2**24
INPUT, RESERVED = "input.jsonl", "reserved"
"""Names of a batch's requests, and of a file whose size says how many bytes the batch may write.
All of it is a hole, which takes no room itself.
"""


class SpoolFull(Exception):
    """A bound of the configuration is reached; the message names it and says what to do."""


def write_record(path: Path, record: object) -> None:
    """Replace a record: readers see the old or the new one."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with new_file(fresh) as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def read_record(path: Path, kind: type[R]) -> R | None:
    """Return a record; None if there is none, or something else. Raises OSError if the disk fails."""
    try:
        return msgspec.json.decode(read_bytes(path, _MAX_RECORD_BYTES), type=kind)
    except (*ABSENT, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def lock(path: Path) -> BinaryIO | None:
    """Acquire the lock that a file stands for, until the file is closed; None if another process has it.

    Raises OSError if its folder is gone.
    """
    file = open_or_create(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    if not os.fstat(file.fileno()).st_nlink:  # The previous owner of the lock deleted the file.
        file.close()
        raise FileNotFoundError(f"{path} was deleted")
    return file


def entries(folder: Path) -> list[Path]:
    """Return the entries of a folder; empty if there is no such folder. Raises OSError if the disk fails."""
    try:
        return list(folder.iterdir())
    except ABSENT:
        return []


class TenantFolder:
    """One tenant's part of the spool. Its methods read and write files, so they are called in threads."""

    def __init__(self, path: Path, settings: FileSettings, clock: Callable[[], float]) -> None:
        self.path, self.settings, self.clock = path, settings, clock
        self.files, self.batches, self.uploads = (path / name for name in ("files", "batches", "uploads"))

    def make(self) -> None:
        """Create missing folders. Only the server's own user may read them."""
        for folder in (self.path, self.files, self.batches, self.uploads):
            make_folder(folder)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all others, in all processes, from reserving room meanwhile. Raises OSError."""
        self.make()
        with open_or_create(self.path / "lock") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield

    def check_room(self, num_bytes: int) -> None:
        """Raise SpoolFull unless the tenant may take so many bytes more. Called while `locked`."""
        most = self.settings.max_total_bytes
        left = most - self.num_bytes()
        if num_bytes > left:
            raise SpoolFull(
                f"{max(left, 0)} bytes are left of the {most} that files and batches may take "
                "(files.max_total_bytes); delete some files."
            )

    def num_bytes(self) -> int:
        """Return the bytes that the tenant takes or has reserved; a file with several names counts once.

        The file `reserved` of a batch is as large as all that the batch may write in its folder.
        """
        inputs: dict[int, int] = {}
        total = 0
        for folder, _, names in os.walk(self.path):
            written = reserved = 0
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(os.path.join(folder, name), follow_symlinks=False)
                    if name == RESERVED:
                        reserved = found.st_size
                    elif found.st_nlink > 1 or name == INPUT:
                        inputs[found.st_ino] = found.st_size
                    else:
                        written += found.st_size
            total += max(written, reserved)
        return total + sum(inputs.values())


class Spool:
    """The directory as a whole."""

    def __init__(self, settings: FileSettings, clock: Callable[[], float] = time.time) -> None:
        """`settings.directory` must be set. `clock` gives Unix seconds."""
        assert settings.directory is not None
        self.settings, self.clock = settings, clock
        self._path = Path(settings.directory)
        self.changed: Callable[[], None] = lambda: None
        """Called in the event loop's thread when a batch was made or cancelled here."""

    def of(self, tenant: str) -> TenantFolder:
        """Return a tenant's folder. The folders of names that differ only in case differ in more than case."""
        digest = hashlib.sha256(tenant.encode()).hexdigest()[:8]
        return TenantFolder(self._path / f"{tenant}-{digest}", self.settings, self.clock)

    def folders(self) -> Iterator[TenantFolder]:
        """Yield the folders of all tenants that have one."""
        for path in sorted(entries(self._path)):
            yield TenantFolder(path, self.settings, self.clock)


def remove(folder: Path) -> None:
    """Remove a folder and all in it, even if other processes remove it too."""
    shutil.rmtree(folder, ignore_errors=True)
