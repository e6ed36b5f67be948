"""Knows which failures are the machine's: no room on a disk, no file descriptor, no memory, a disk that fails.

They are the operator's to end, and no defect: the client gets a status that says so, and the log gets one line.
"""

from __future__ import annotations

import errno
import logging

from deployments.api.errors import RETRY_AFTER_S, ApiError, internal

logger = logging.getLogger(__name__)

_LATER = "; retry later, or ask the operator."
_FULL = 507, "disk_full", "The server's disk, or its quota there, is full, so nothing was stored" + _LATER
_READ_ONLY = 507, "disk_read_only", "The server's disk can only be read, so nothing was stored; ask the operator."
_FAILS = 503, "storage_unavailable", "The server's disk does not answer as it should" + _LATER
_DESCRIPTORS = 503, "too_many_open_files", "The server has as many files and connections open as it may" + _LATER
_MEMORY = 503, "out_of_memory", "The server has no memory or no process left for this request" + _LATER

_SHORTAGES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    errno.EROFS: _READ_ONLY,
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), _DESCRIPTORS),
    **dict.fromkeys((errno.ENOMEM, errno.EAGAIN), _MEMORY),
    **dict.fromkeys((errno.EIO, errno.EACCES, errno.EPERM, errno.ENODEV, errno.ENXIO, errno.ENOTDIR), _FAILS),
    **dict.fromkeys((errno.ESTALE, errno.ENOLCK, errno.EHOSTDOWN, errno.ETIMEDOUT), _FAILS),  # a network's disk
}


def shortage(error: BaseException) -> ApiError | None:
    """Return the error to answer with where the machine is short of something; None for all other failures."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    if not isinstance(error, OSError | MemoryError) or number not in _SHORTAGES:
        return None
    status, code, message = _SHORTAGES[number]
    return ApiError(status, message, code=code, headers={"retry-after": f"{RETRY_AFTER_S:.0f}"})


def answer_to(error: Exception, request_id: str) -> ApiError:
    """Return the error to answer with where something failed that no check foresaw."""
    return shortage(error) or internal(request_id)


def log_failure(error: Exception, what: str) -> None:
    """Log why `what` failed: a defect with where it happened, and all else in one line."""
    if shortage(error) is None and not isinstance(error, ApiError):
        logger.error("%s failed", what, exc_info=error)
    else:
        logger.warning("%s failed: %s", what, error)
