"""Keeps records in a directory, which several processes share.

    DIRECTORY/TENANT-1a2b3c4d/resp_…    "RDX1", CRC-32 of the record, the record; its time is that of the last use

Records are replaced as a whole; a truncated record, or one of another tenant, counts as missing. From time to
time, and after many writes, one process at a time deletes records that are too old or too many.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from deployments.api.responses.store import too_large
from deployments.batch.in_thread import in_thread
from deployments.batch.spool import ABSENT, entries, lock
from engine.base.files import make_folder, new_file, open_or_create, read_bytes

MAGIC = b"RDX1"
RECORD_BYTES = 4096
"""Overhead of a record."""
SHARE = 16
"""The bound may be exceeded by this part of it, by each process."""
SWEEP_S = 60.0
_NAME = re.compile(r"[a-z]{1,16}_[0-9a-f]{32}")


class _Kept(NamedTuple):
    used_at: float
    size: int
    path: Path


class DirectoryStore:
    """A `ResponseStore` that all ingresses with the same directory share."""

    is_shared = True

    def __init__(
        self, directory: Path, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """All processes together keep about `max_bytes`, and nothing that was not used for `ttl_s` seconds."""
        self._directory, self._max_bytes, self._ttl_s, self._clock = directory, max_bytes, ttl_s, clock
        self._num_written = 0
        self._swept_at = float("-inf")

    async def put(self, tenant: str, name: str, record: bytes) -> None:
        """Keep a record. Raises OSError; `ApiError` 507 where it can never fit."""
        await in_thread(self._put, self._path(tenant, name), record)

    async def get(self, tenant: str, names: Sequence[str]) -> list[bytes | None]:
        """Return the records with these names. Raises OSError."""
        if not names:
            return []
        return await in_thread(lambda: [self._get(self._path(tenant, name)) for name in names])

    async def update(self, tenant: str, name: str, change: Callable[[bytes], bytes]) -> bool:
        """Replace a record by `change`'s result, in a thread. Raises OSError."""
        return await in_thread(self._update, self._path(tenant, name), change)

    async def delete(self, tenant: str, name: str) -> bool:
        """Forget a record. Raises OSError."""
        path = self._path(tenant, name)
        is_there = await in_thread(self._get, path) is not None
        await in_thread(path.unlink, missing_ok=True)
        return is_there

    async def aclose(self) -> None:
        """Close nothing."""

    def _path(self, tenant: str, name: str) -> Path:
        assert _NAME.fullmatch(name), "names are this server's own"
        digest = hashlib.sha256(tenant.encode()).hexdigest()[:8]
        return self._directory / f"{tenant}-{digest}" / name

    def _put(self, path: Path, record: bytes) -> None:
        if len(record) + RECORD_BYTES > self._max_bytes:
            raise too_large(len(record) + RECORD_BYTES, self._max_bytes)
        now = self._clock()
        content = MAGIC + zlib.crc32(record).to_bytes(4, "big") + record
        while not _placed(path, content, now):
            pass  # Another process has deleted it as the least recently used record.
        self._num_written += len(record) + RECORD_BYTES
        if self._num_written >= self._max_bytes // SHARE or now - self._swept_at >= SWEEP_S:
            with contextlib.suppress(OSError):  # the record is kept, whether or not others can be forgotten
                self._sweep(now)

    def _update(self, path: Path, change: Callable[[bytes], bytes]) -> bool:
        if self._get(path) is None:
            return False
        with open_or_create(path.with_name("lock")) as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # only while a record is written
            record = self._get(path)
            if record is not None:
                self._put(path, change(record))
        return record is not None

    def _get(self, path: Path) -> bytes | None:
        now = self._clock()
        try:
            content = read_bytes(path, self._max_bytes)
            if path.stat().st_mtime < now - self._ttl_s:
                return None
        except ABSENT:
            return None
        record = content[8:]
        if content[:4] != MAGIC or content[4:8] != zlib.crc32(record).to_bytes(4, "big"):
            return None
        with contextlib.suppress(OSError):  # Another process has deleted it meanwhile.
            os.utime(path, (now, now))
        return record

    def _sweep(self, now: float) -> None:
        """Delete records that are too old; then the least recently used ones of the tenant with the most."""
        held = lock(self._directory / "lock")
        if held is None:  # Another process is sweeping.
            return
        with held:
            self._num_written, self._swept_at = 0, now
            kept = {folder: self._fresh(folder, now) for folder in entries(self._directory) if folder.is_dir()}
            sizes = {folder: sum(record.size for record in records) for folder, records in kept.items()}
            most, total = self._max_bytes - self._max_bytes // SHARE, sum(sizes.values())
            while total > most:
                richest = max(sizes, key=sizes.__getitem__)
                oldest = kept[richest].pop()
                _forget(oldest.path)
                sizes[richest] -= oldest.size
                total -= oldest.size

    def _fresh(self, folder: Path, now: float) -> list[_Kept]:
        """Return a tenant's records, those last that were not used for longest; forget those that are too old."""
        found = []
        for path in entries(folder):
            if not _NAME.fullmatch(path.name) and path.suffix != ".tmp":
                continue  # not a file of the store
            with contextlib.suppress(OSError):
                state = path.stat()
                if state.st_mtime < now - self._ttl_s:
                    _forget(path)
                else:
                    found.append(_Kept(state.st_mtime, state.st_size + RECORD_BYTES, path))
        return sorted(found, reverse=True)


def _placed(path: Path, content: bytes, now: float) -> bool:
    """Write a whole file and give it its name; return False where it was removed before that. Raises OSError."""
    make_folder(path.parent)
    fresh = path.with_name(f"{secrets.token_hex(8)}.tmp")
    try:
        with new_file(fresh) as file:
            file.write(content)
        with contextlib.suppress(FileNotFoundError):
            os.utime(fresh, (now, now))
            fresh.replace(path)
            return True
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return False


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
