"""A directory of KV pages: one file for each page, by the key that stands for its tokens (`cache/page_keys.py`).

    DIRECTORY/raydix-kv.json         the model and the layout of all pages here
    DIRECTORY/3f/3f9c…e1.kv          magic │ checksum of the rest │ key │ the page's bytes, layer by layer

A file appears under its name when it is whole, so that several engines may write, read and delete here at once:
what two write under one name is the same. No file is believed: one that is cut off, changed or of another page is
deleted, and its page computed again. Files are not flushed to the disk, which the checksum makes needless.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "raydix-kv.json"
_MAGIC = b"RDXKV\x01\x00\x00"
_CRC_BYTES, _KEY_BYTES = 4, 32
_HEADER = len(_MAGIC) + _CRC_BYTES + _KEY_BYTES
_SUFFIX, _WRITING = ".kv", ".part"
_FOLDER, _PAGE = re.compile("[0-9a-f]{2}"), re.compile(r"[0-9a-f]{64}\.kv")
_ABANDONED_S = 3600.0
"""Age of a file that somebody began to write and has surely given up."""
_MOST_PIECES = 512
"""Pieces of memory in one system call; Linux takes 1,024."""


class PageFiles:
    """The pages in one directory. `has` may be called by one thread while others read and write."""

    def __init__(self, directory: Path, identity: dict[str, str | int], max_bytes: int) -> None:
        """`identity` says whose pages these are: the fingerprint of the model and the layout of a page.

        Raises ValueError that says what to do if the directory cannot be used or holds the pages of another model.
        """
        self.directory = directory
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # by key, the least recently used first
        self._bytes = 0
        self._lock = threading.Lock()
        self._scanned: dict[str, int] = {}  # subdirectory -> when it had changed, as it was last read
        self._num_written = 0
        _open(directory, identity)
        self.scan()

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files that are known here."""
        return self._bytes

    def has(self, key: bytes) -> bool:
        """Whether the page is there, as far as this engine knows. O(1), without a look at the directory."""
        return key in self._sizes

    def scan(self) -> None:
        """Learn what others have written and deleted. Reads only the subdirectories that changed since the last
        time.
        """
        found: dict[bytes, Path] = {}
        changed = set()
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.directory):
                if _FOLDER.fullmatch(entry.name) and entry.is_dir():
                    changed_at = entry.stat().st_mtime_ns
                    if self._scanned.get(entry.name) != changed_at:
                        self._scanned[entry.name] = changed_at
                        changed.add(int(entry.name, 16))
                        found.update(_pages_in(entry))
        with self._lock:
            for key in [key for key in self._sizes if key[0] in changed and key not in found]:
                self._bytes -= self._sizes.pop(key)
        new = []
        for key, path in found.items():
            if key not in self._sizes:
                with contextlib.suppress(OSError):
                    status = path.stat()
                    new.append((status.st_mtime, key, status.st_size))
        with self._lock:
            for _, key, size in sorted(new):
                self._bytes += size - self._sizes.pop(key, 0)
                self._sizes[key] = size
        self._make_room(0)

    def write(self, key: bytes, pieces: Sequence[memoryview]) -> None:
        """Write a page. Raises OSError, and then leaves nothing behind."""
        size = _HEADER + sum(piece.nbytes for piece in pieces)
        if size > self._max_bytes:
            return
        self._make_room(size)
        path = self._path(key)
        self._num_written += 1
        part = path.with_name(f"{os.getpid()}-{id(self)}-{self._num_written}{_WRITING}")
        header = _MAGIC + _checksum(key, pieces).to_bytes(_CRC_BYTES, "little") + key
        path.parent.mkdir(exist_ok=True)
        try:
            with open(part, "wb", buffering=0) as file:
                _transfer(os.writev, file.fileno(), [memoryview(header), *pieces])
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        with self._lock:
            self._bytes += size - self._sizes.pop(key, 0)
            self._sizes[key] = size

    def read(self, key: bytes, pieces: Sequence[memoryview]) -> bool:
        """Read a page into memory; False if it is not there or not what was written, which is then forgotten.

        The memory may have been written to in any case.
        """
        path = self._path(key)
        header = bytearray(_HEADER)
        try:
            with open(path, "rb", buffering=0) as file:
                whole = os.fstat(file.fileno()).st_size == _HEADER + sum(piece.nbytes for piece in pieces)
                if whole:
                    _transfer(os.readv, file.fileno(), [memoryview(header), *pieces])
        except FileNotFoundError:  # another engine needed its room
            self._forget(key)
            return False
        except OSError as error:
            logger.warning("cannot read %s, so its page is computed again: %s", path, error)
            self._forget(key)
            return False
        expected = _MAGIC + _checksum(key, pieces).to_bytes(_CRC_BYTES, "little") + key if whole else b""
        if header != expected:
            logger.warning("%s is not what was written there: it is deleted, and its page computed again", path)
            self.delete(key)
            return False
        with self._lock:
            if key in self._sizes:
                self._sizes.move_to_end(key)
        with contextlib.suppress(OSError):
            os.utime(path)  # so that it counts as used after a restart, and with the others who share it
        return True

    def forget_all(self) -> list[bytes]:
        """Forget all pages, and return their keys: their files are still to be deleted."""
        with self._lock:
            keys = list(self._sizes)
            self._sizes.clear()
            self._bytes = 0
        return keys

    def _make_room(self, size: int) -> None:
        """Delete what was not used for longest, until `size` bytes more fit."""
        while self._bytes + size > self._max_bytes and self._sizes:
            with self._lock:
                oldest = next(iter(self._sizes))
            self.delete(oldest)

    def delete(self, key: bytes) -> None:
        """Delete a page's file, if there is one."""
        self._forget(key)
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._bytes -= self._sizes.pop(key, 0)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.directory / name[:2] / f"{name}{_SUFFIX}"


def _open(directory: Path, identity: dict[str, str | int]) -> None:
    """Check that the directory is there, can be written and is this model's."""
    if not directory.is_dir():
        raise ValueError(
            f"kv_tier.directory is {directory}, which is not a directory: create it, or name another one"
        )
    identity = {"format": FORMAT, **identity}
    manifest = directory / MANIFEST
    part = directory / f"{os.getpid()}-{id(identity)}{_WRITING}"
    try:
        part.write_text(json.dumps(identity, indent=1) + "\n")
        if manifest.exists():
            part.unlink()
        else:
            os.replace(part, manifest)
        found = json.loads(manifest.read_text())
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "its disk is full: make room" if is_full else "this user must be able to read and write there"
        raise ValueError(f"kv_tier.directory is {directory}, but {advice} ({error})") from error
    except ValueError as error:
        raise ValueError(
            f"kv_tier.directory is {directory}, but its {MANIFEST} is no JSON, so it is not known whose pages lie "
            f"there: delete them, or name another directory ({error})"
        ) from error
    if found != identity:
        raise ValueError(
            f"kv_tier.directory is {directory}, which holds the pages of another model or layout "
            f"({_difference(found, identity)}): give each a directory of its own, for which "
            '"{fingerprint}" may be part of its name, or delete what is there'
        )


def _difference(found: object, expected: dict[str, str | int]) -> str:
    if not isinstance(found, dict):
        return f"{MANIFEST} is no JSON object"
    different = [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
    return ", ".join(f"{name} {found.get(name)!r} instead of {expected.get(name)!r}" for name in different)


def _pages_in(directory: os.DirEntry[str]) -> Iterator[tuple[bytes, Path]]:
    """Yield keys and paths of the pages in a subdirectory, and delete what somebody has given up writing."""
    for entry in os.scandir(directory.path):
        with contextlib.suppress(OSError):
            if _PAGE.fullmatch(entry.name) and entry.name.startswith(directory.name):
                yield bytes.fromhex(entry.name[: -len(_SUFFIX)]), Path(entry.path)
            elif entry.name.endswith(_WRITING) and time.time() - entry.stat().st_mtime > _ABANDONED_S:
                os.unlink(entry.path)


def _checksum(key: bytes, pieces: Sequence[memoryview]) -> int:
    """CRC-32 of a page and its key, as zlib has it."""
    crc = zlib.crc32(key)
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


def _transfer(call: object, fd: int, pieces: Sequence[memoryview]) -> None:
    """Read or write all the pieces, in as many system calls as that takes. Raises OSError if it ends before."""
    left = [piece.cast("B") for piece in pieces]
    while left:
        done = call(fd, left[:_MOST_PIECES])  # type: ignore[operator]
        if not done:
            raise OSError(errno.EIO, "the file ends too early")
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if done:
            left[0] = left[0][done:]
