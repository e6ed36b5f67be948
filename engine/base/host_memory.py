"""Large allocations of host memory in huge pages, which the system provides when they are first written."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch

_HUGE_PAGE = 2 * 2**20
"""Bytes of a huge page, for which a processor translates 512 times fewer addresses than for ordinary pages."""


def untouched_zeros(num_bytes: int, lower: str | None = None) -> torch.Tensor:
    """Return uint8 [num_bytes] of zeros that take no memory until they are written, unlike those of torch.zeros.

    If the system has huge pages, a first write takes 2 MiB. The data is aligned to 2 MiB. If the system does not
    have so much memory, raises ValueError that says which settings to `lower`, or without any, OSError.
    """
    try:
        memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        if lower is None:
            raise
        raise ValueError(f"{num_bytes / 2**30:,.0f} GiB of memory cannot be allocated; lower {lower}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, dtype=np.uint8)
    start = -raw.ctypes.data % _HUGE_PAGE
    return torch.from_numpy(raw[start : start + num_bytes])
