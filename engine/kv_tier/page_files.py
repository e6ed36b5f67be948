"""A directory of KV pages: one file for each page, by the key that stands for its tokens (`cache/page_keys.py`).

    DIRECTORY/raydix-kv.json         the model and the layout of all pages here, and the directory's own name
    DIRECTORY/3f/3f9c…e1.kv          magic │ checksum of the rest │ key │ the page's bytes, layer by layer │ blocks

The blocks are the hashes by which routers know what is in the page. What files of others and of earlier engines
have of them is read little by little, the newest first.

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
import secrets
import struct
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cache.store_log import StoreLog

logger = logging.getLogger(__name__)

FORMAT = 2
MANIFEST = "raydix-kv.json"
_MAGIC = b"RDXKV\x02\x00\x00"
_CRC_BYTES, _KEY_BYTES = 4, 32
_HEADER = len(_MAGIC) + _CRC_BYTES + _KEY_BYTES
_SUFFIX, _WRITING = ".kv", ".part"
_FOLDER, _PAGE = re.compile("[0-9a-f]{2}"), re.compile(r"[0-9a-f]{64}\.kv")
_ABANDONED_S = 3600.0
"""Age of a file that somebody began to write and has surely given up."""
_MOST_PIECES = 512
"""Pieces of memory in one system call; Linux takes 1,024."""
_BLOCK_BYTES, _MOST_BLOCKS = 8, 4096
"""Bytes of a block's hash, and most blocks of a page."""


class _File(NamedTuple):
    size: int
    blocks: tuple[int, ...] | None = None
    """None: they were not read yet."""


class PageFiles:
    """The pages in one directory. `has` may be called by one thread while others read and write."""

    def __init__(self, directory: Path, identity: dict[str, str | int], page_bytes: int, max_bytes: int) -> None:
        """`identity` says whose pages these are: the fingerprint of the model and the layout of a page.

        Raises ValueError that says what to do if the directory cannot be used or holds the pages of another model.
        """
        self.directory = directory
        self.log = StoreLog()
        """Which blocks are here, as far as that was read."""
        self._page_bytes, self._max_bytes = page_bytes, max_bytes
        self._files: OrderedDict[bytes, _File] = OrderedDict()  # by key, the least recently used first
        self._unread: deque[bytes] = deque()  # whose blocks are not known, the newest last
        self._bytes = 0
        self._lock = threading.Lock()
        self._scanned: dict[str, int] = {}  # subdirectory -> when it had changed, as it was last read
        self._num_written = 0
        self.name = _open(directory, identity)
        """Names the directory: the same for all engines that share it."""
        self.scan()

    def __len__(self) -> int:
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files that are known here."""
        return self._bytes

    def has(self, key: bytes) -> bool:
        """Whether the page is there, as far as this engine knows. O(1), without a look at the directory."""
        return key in self._files

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
            for key in [key for key in self._files if key[0] in changed and key not in found]:
                self._drop(key)
        new = []
        for key, path in found.items():
            if key not in self._files:
                with contextlib.suppress(OSError):
                    status = path.stat()
                    new.append((status.st_mtime, key, status.st_size))
        with self._lock:
            for _, key, size in sorted(new):
                if key not in self._files:
                    self._put(key, _File(size))
                    self._unread.append(key)
        self._make_room(0)

    def learn_blocks(self, most: int) -> bool:
        """Read which blocks are in up to `most` of the files that others have written, the newest first. Return
        whether there may be more.
        """
        for _ in range(most):
            if not self._unread:
                return False
            key = self._unread.pop()
            if key in self._files:
                self._learn(key, self._blocks_in(key))
        return True

    def _blocks_in(self, key: bytes) -> tuple[int, ...]:
        """Read the end of a file. It is not checked: blocks that are not in the page mislead a router at most."""
        with contextlib.suppress(OSError), open(self._path(key), "rb", buffering=0) as file:
            num_blocks = self._num_blocks(os.fstat(file.fileno()).st_size)
            if num_blocks:
                data = os.pread(file.fileno(), num_blocks * _BLOCK_BYTES, _HEADER + self._page_bytes)
                if len(data) == num_blocks * _BLOCK_BYTES:
                    return struct.unpack(f"<{num_blocks}Q", data)
        return ()

    def _num_blocks(self, size: int) -> int | None:
        """Return the blocks in a file of a size; None for a size that no file has."""
        num_blocks, rest = divmod(size - _HEADER - self._page_bytes, _BLOCK_BYTES)
        return None if rest or not 0 <= num_blocks <= _MOST_BLOCKS else num_blocks

    def _learn(self, key: bytes, blocks: tuple[int, ...]) -> None:
        with self._lock:
            file = self._files.get(key)
            if file is not None and file.blocks is None:
                self._files[key] = file._replace(blocks=blocks)
                self.log.store(blocks)

    def use(self, keys: Iterable[bytes]) -> None:
        """Note that pages are of use, so that others go first; the last one goes last."""
        with self._lock:
            for key in keys:
                if key in self._files:
                    self._files.move_to_end(key)

    def write(self, key: bytes, pieces: Sequence[memoryview], blocks: Sequence[int] = ()) -> None:
        """Write a page with the blocks of those hashes. Raises OSError, and then leaves nothing behind."""
        end = struct.pack(f"<{len(blocks)}Q", *blocks)
        pieces = [*pieces, memoryview(end)] if end else pieces
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
            self._drop(key)
            self._put(key, _File(size, tuple(blocks)))
            self.log.store(blocks)

    def read(self, key: bytes, pieces: Sequence[memoryview]) -> bool:
        """Read a page into memory; False if it is not there or not what was written, which is then forgotten.

        The memory may have been written to in any case.
        """
        path = self._path(key)
        header, blocks = bytearray(_HEADER), bytearray()
        try:
            with open(path, "rb", buffering=0) as file:
                num_blocks = self._num_blocks(os.fstat(file.fileno()).st_size)
                if num_blocks is not None:
                    blocks = bytearray(num_blocks * _BLOCK_BYTES)
                    _transfer(os.readv, file.fileno(), [memoryview(header), *pieces, memoryview(blocks)])
        except FileNotFoundError:  # another engine needed its room
            self._forget(key)
            return False
        except OSError as error:
            logger.warning("cannot read %s, so its page is computed again: %s", path, error)
            self._forget(key)
            return False
        expected = b""
        if num_blocks is not None:
            checksum = _checksum(key, [*pieces, memoryview(blocks)])
            expected = _MAGIC + checksum.to_bytes(_CRC_BYTES, "little") + key
        if header != expected:
            logger.warning("%s is not what was written there: it is deleted, and its page computed again", path)
            self.delete(key)
            return False
        self._learn(key, struct.unpack(f"<{num_blocks}Q", blocks))
        self.use([key])
        with contextlib.suppress(OSError):
            os.utime(path)  # so that it counts as used after a restart, and with the others who share it
        return True

    def forget_all(self) -> list[bytes]:
        """Forget all pages, and return their keys: their files are still to be deleted."""
        with self._lock:
            keys = list(self._files)
            for key in keys:
                self._drop(key)
        return keys

    def _make_room(self, size: int) -> None:
        """Delete what was not used for longest, until `size` bytes more fit."""
        while self._bytes + size > self._max_bytes:
            with self._lock:
                oldest = next(iter(self._files), None)
            if oldest is None:
                return
            self.delete(oldest)

    def delete(self, key: bytes) -> None:
        """Delete a page's file, if there is one."""
        self._forget(key)
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._drop(key)

    def _put(self, key: bytes, file: _File) -> None:
        self._files[key] = file
        self._bytes += file.size

    def _drop(self, key: bytes) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            self._bytes -= file.size
            self.log.evict(file.blocks or ())

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.directory / name[:2] / f"{name}{_SUFFIX}"


def _open(directory: Path, identity: dict[str, str | int]) -> str:
    """Check that the directory is there, can be written and is this model's; return its name."""
    if not directory.is_dir():
        raise ValueError(
            f"kv_tier.directory is {directory}, which is not a directory: create it, or name another one"
        )
    identity = {"format": FORMAT, **identity}
    manifest = directory / MANIFEST
    part = directory / f"{os.getpid()}-{id(identity)}{_WRITING}"
    try:
        part.write_text(json.dumps({**identity, "name": secrets.token_hex(16)}, indent=1) + "\n")
        _put_in_place(part, manifest)
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
    name = found.pop("name", None) if isinstance(found, dict) else None
    if found != identity or not isinstance(name, str):
        raise ValueError(
            f"kv_tier.directory is {directory}, which holds the pages of another model or layout "
            f"({_difference(found, identity)}): give each a directory of its own, for which "
            '"{fingerprint}" may be part of its name, or delete what is there'
        )
    return name


def _put_in_place(part: Path, manifest: Path) -> None:
    """Have the first of several engines name a directory that they share."""
    try:
        os.link(part, manifest)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        if not manifest.exists():
            os.replace(part, manifest)
            return
    part.unlink()


def _difference(found: object, expected: dict[str, str | int]) -> str:
    if not isinstance(found, dict):
        return f"{MANIFEST} is no JSON object"
    different = [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
    listed = (f"{name} {found.get(name)!r} instead of {expected.get(name)!r}" for name in different)
    return ", ".join(listed) or f"{MANIFEST} has no name"


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
