"""Identifies failures of the machine: a full or failing disk, no file descriptors, no memory.

They are no defect, and the operator has to fix them: the client gets a status that says so, the log one line.
"""

from __future__ import annotations

import errno
from typing import NamedTuple


class Shortage(NamedTuple):
    """The answer to a request that failed because a resource of the machine is exhausted."""

    status: int
    code: str
    message: str


_LATER = "; retry later, or ask the operator."
_FULL = Shortage(
    507, "disk_full", "The server's disk, or its quota there, is full, so nothing was stored" + _LATER
)
_READ_ONLY = Shortage(
    507, "disk_read_only", "The server's disk is read-only, so nothing was stored; ask the operator."
)
_FAILS = Shortage(503, "storage_unavailable", "The server's disk reports errors" + _LATER)
_DESCRIPTORS = Shortage(
    503, "too_many_open_files", "The server has reached its limit of open files and connections" + _LATER
)
_MEMORY = Shortage(
    503, "out_of_memory", "The server has no memory, thread or process left for this request" + _LATER
)

_SHORTAGES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    errno.EROFS: _READ_ONLY,
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), _DESCRIPTORS),
    **dict.fromkeys((errno.ENOMEM, errno.EAGAIN), _MEMORY),
    **dict.fromkeys((errno.EIO, errno.EACCES, errno.EPERM, errno.ENODEV, errno.ENXIO, errno.ENOTDIR), _FAILS),
    **dict.fromkeys((errno.ESTALE, errno.ENOLCK, errno.EHOSTDOWN, errno.ETIMEDOUT), _FAILS),  # a network disk
}


def shortage(error: BaseException) -> Shortage | None:
    """Return the machine's shortage that caused an exception, or its cause, if any."""
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    ):
        return _MEMORY
    if isinstance(error, OSError) and error.errno in _SHORTAGES:
        return _SHORTAGES[error.errno]
    return None if error.__cause__ is None else shortage(error.__cause__)
