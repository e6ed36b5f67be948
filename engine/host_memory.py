"""Large pieces of a machine's own memory: by huge pages, and from the system only as they are written."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch

_HUGE_PAGE = 2 * 2**20
"""Bytes of the pages that processors translate 512 times fewer addresses for; what is smaller aligns to it too."""


def untouched_zeros(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of zeros that the system backs with memory when they are first written (torch.zeros
    touches them all), by huge pages where it has them: a first write then takes 2 MiB. Aligned to that.
    """
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, dtype=np.uint8)
    start = -raw.ctypes.data % _HUGE_PAGE
    return torch.from_numpy(raw[start : start + num_bytes])
