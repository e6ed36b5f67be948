"""The file of one page: its layout, and how it is written and read. Each of several ranks has its own.

    magic │ checksum of the rest │ key │ the page's bytes, layer by layer │ the blocks in it

A file gets its name when it is complete. No file is trusted: `read` compares everything. Files are not flushed to
the disk, because the checksum reveals lost data.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from engine.base.files import PRIVATE_FOLDER, open_regular, rewrite

SUFFIX, WRITING = ".kv", ".part"
_MAGIC = b"RDXKV\x02\x00\x00"
_CRC_BYTES, _KEY_BYTES = 4, 32
_HEADER = len(_MAGIC) + _CRC_BYTES + _KEY_BYTES
_NAME = re.compile(r"([0-9a-f]{64})(?:\.([0-9]{1,4}))?\.kv")
_BLOCK_BYTES, _MOST_BLOCKS = 8, 4096
"""Bytes of a block's hash, and most blocks of a page."""


class SpoiltFile(Exception):
    """A file differs from the written one."""


class RankFiles:
    """The files of one rank's part of pages. Thread-safe, because files of one name have the same content."""

    def __init__(self, directory: Path, page_bytes: int, rank: int = 0, num_ranks: int = 1) -> None:
        """`page_bytes`: bytes of the rank's part of a page."""
        self.directory, self.num_ranks = directory, num_ranks
        self._page_bytes, self.rank = page_bytes, rank
        self._num_written = 0

    def size(self, num_blocks: int) -> int:
        """Return the bytes of a file."""
        return _HEADER + self._page_bytes + num_blocks * _BLOCK_BYTES

    def write(self, key: bytes, page: memoryview, blocks: Sequence[int]) -> None:
        """Write a page and the hashes of its blocks. Raises OSError, and then leaves no file."""
        end = struct.pack(f"<{len(blocks)}Q", *blocks)
        path = self._path(key, self.rank)
        self._num_written += 1
        part = path.with_name(f"{os.getpid()}-{id(self)}-{self._num_written}{WRITING}")
        header = _MAGIC + _checksum(key, page, end).to_bytes(_CRC_BYTES, "little") + key
        path.parent.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        try:
            with rewrite(part) as file:
                _transfer(os.writev, file.fileno(), [header, page, end])
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise

    def read(self, key: bytes, page: memoryview) -> tuple[int, ...]:
        """Read a page into `page`, and return the hashes of its blocks. Raises OSError (FileNotFoundError if there
        is none) and SpoiltFile; the memory may be overwritten all the same.
        """
        path = self._path(key, self.rank)
        header = bytearray(_HEADER)
        with open_regular(path) as file:
            num_blocks = self._num_blocks(os.fstat(file.fileno()).st_size)
            if num_blocks is None:
                raise SpoiltFile(f"{path} has another size than a page")
            blocks = bytearray(num_blocks * _BLOCK_BYTES)
            _transfer(os.readv, file.fileno(), [header, page, blocks])
        checksum = _checksum(key, page, blocks)
        if header != _MAGIC + checksum.to_bytes(_CRC_BYTES, "little") + key:
            raise SpoiltFile(f"{path} differs from the file that was written")
        with contextlib.suppress(OSError):
            os.utime(path)  # so that it counts as used after a restart, and for engines that share it
        return struct.unpack(f"<{num_blocks}Q", blocks)

    def blocks_in(self, key: bytes) -> tuple[int, ...]:
        """Read the end of a file, unchecked: wrong blocks can only mislead a router."""
        with contextlib.suppress(OSError), open_regular(self._path(key, self.rank)) as file:
            num_blocks = self._num_blocks(os.fstat(file.fileno()).st_size)
            if num_blocks:
                data = os.pread(file.fileno(), num_blocks * _BLOCK_BYTES, _HEADER + self._page_bytes)
                if len(data) == num_blocks * _BLOCK_BYTES:
                    return struct.unpack(f"<{num_blocks}Q", data)
        return ()

    def delete(self, key: bytes) -> None:
        """Delete the existing files of a page, those of all ranks."""
        for rank in range(self.num_ranks):
            with contextlib.suppress(OSError):
                self._path(key, rank).unlink()

    def _path(self, key: bytes, rank: int) -> Path:
        name = key.hex()
        whose = f".{rank}" if self.num_ranks > 1 else ""
        return self.directory / name[:2] / f"{name}{whose}{SUFFIX}"

    def _num_blocks(self, size: int) -> int | None:
        """Return the number of blocks in a file of a size; None for a size that no file has."""
        num_blocks, rest = divmod(size - self.size(0), _BLOCK_BYTES)
        return None if rest or not 0 <= num_blocks <= _MOST_BLOCKS else num_blocks

    def key_of(self, name: str) -> bytes | None:
        """Return the key of a file's page, by the file's name, for any rank; None if it is no page's."""
        found = _NAME.fullmatch(name)
        is_ours = found is not None and (found[2] is not None) == (self.num_ranks > 1)
        if found is None or not is_ours or (found[2] is not None and int(found[2]) >= self.num_ranks):
            return None
        return bytes.fromhex(found[1])


def _checksum(key: bytes, page: memoryview, blocks: bytes | bytearray) -> int:
    """Return the CRC-32 (zlib's) of a page, its key and its blocks."""
    return zlib.crc32(blocks, zlib.crc32(page, zlib.crc32(key)))


def _transfer(call: object, fd: int, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
    """Read or write all the pieces, in as many system calls as needed. Raises OSError if the file is too short."""
    left = [memoryview(piece) for piece in pieces if piece]
    while left:
        done = call(fd, left)  # type: ignore[operator]
        if not done:
            raise OSError(errno.EIO, "the file ends too early")
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if done:
            left[0] = left[0][done:]
