"""Opens files that other users may have made, and creates files that only this server's user can read.

In a directory that others write to, a name may belong to a FIFO, which would block its reader forever, a device or
a socket. So files are opened without waiting, and read only if they are regular files.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)
_PIECE_BYTES = 2**20
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700
"""Modes of created files and folders: only this server's user can read them."""


class NotRegular(OSError):
    """A regular file was expected, and this is none."""

    def __init__(self, path: str | Path, mode: int) -> None:
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "not a regular file")
        super().__init__(errno.EINVAL, f"is {kind}, and a regular file was expected", str(path))


class TooLarge(OSError):
    """A file has more bytes than may be read of it."""

    def __init__(self, path: str | Path, max_bytes: int) -> None:
        super().__init__(errno.EFBIG, f"has more than {max_bytes} bytes, the most that are read", str(path))


def open_fd(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file, without waiting; one that `flags` create is readable only by this
    user.

    Raises OSError, including `NotRegular`.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, PRIVATE)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise NotRegular(path, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError."""
    return os.fdopen(open_fd(path), "rb")


def read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raises OSError, including `TooLarge`."""
    content = bytearray()
    with open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):  # read(max_bytes) would first allocate max_bytes
            content += piece
            if len(content) > max_bytes:
                raise TooLarge(path, max_bytes)
    return bytes(content)


def checked(path: str | Path, max_bytes: int | None = None) -> os.stat_result:
    """Return the status of a file that a library opens itself. Raises OSError unless it is a regular file."""
    descriptor = open_fd(path)
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if max_bytes is not None and found.st_size > max_bytes:
        raise TooLarge(path, max_bytes)
    return found


def rewrite(path: str | Path) -> BinaryIO:
    """Open a file for overwriting it; if there is none, create one that only this user can read."""
    return os.fdopen(open_fd(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")


def read_text(path: str | Path, max_bytes: int) -> str:
    """Return the content of a regular file, as UTF-8. Raises OSError, UnicodeDecodeError."""
    return read_bytes(path, max_bytes).decode()


def new_file(path: str | Path) -> BinaryIO:
    """Create a file for writing that only this user can read. Raises FileExistsError, OSError."""
    return os.fdopen(open_fd(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")


def open_or_create(path: str | Path) -> BinaryIO:
    """Open a file for reading and writing; if there is none, create one that only this user can read."""
    return os.fdopen(open_fd(path, os.O_RDWR | os.O_CREAT), "r+b")


def users_cache() -> Path:
    """Return the directory `raydix` in the user's cache: $XDG_CACHE_HOME if it is an absolute path, as its
    specification demands, or else ~/.cache.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path("~/.cache").expanduser()) / "raydix"


def make_folder(path: Path) -> None:
    """Create a folder and its parents if they are missing; only this user can enter the created ones."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is not a directory", str(path))
