"""Counts the memory that this process has allocated, for measuring work that runs by itself."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from functools import cache


def allocated_bytes() -> int:
    """Return the bytes that the C library has allocated and not freed.

    Only glibc since 2.33 reports them; elsewhere, return the memory that is in use, in whole pages.
    """
    count = _glibc_count()
    if count is not None:
        return count()
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * resource.getpagesize()


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: `uordblks` bytes are in use in the heap, `hblkhd` in separate mappings."""

    _fields_ = (
        ("arena_to_hblks", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),
        ("usmblks_to_fsmblks", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),
        ("fordblks_to_keepcost", ctypes.c_size_t * 2),
    )


@cache
def _glibc_count() -> Callable[[], int] | None:
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo.restype = _MallInfo

    def count() -> int:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)

    return count
