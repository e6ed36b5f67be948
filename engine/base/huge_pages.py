"""Moves the memory of a ready process to pages of 2 MiB, where the kernel supports it (Linux 6.1 and later).

A request touches thousands of places in a Python process, nearly each in its own page of 4 KiB. If an engine
computes on the same processor, its weights displace these pages' entries from the processor's caches, and a page's
look-up takes as long as reading it. With pages of 2 MiB there is little to look up.

Memory is moved once (`MADV_COLLAPSE`, madvise(2)), only where most of it is in use, so that a process grows by at
most a quarter of the moved bytes, and only as much as a start has time for. If an administrator has turned such
pages off, nothing is moved.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

_HUGE = 2 * 2**20
_PAGE = 4096
_COLLAPSE = 25
"""The number of `MADV_COLLAPSE`."""
_LEAST_IN_USE = 0.75
"""Share of 2 MiB that has to be in memory; the kernel would fill the rest with zeros."""
_LARGEST = 64 * 2**20
"""Largest piece of memory, except for the heap, in bytes: larger ones are matrices and KV, read in order."""
_MOST = 2**30
"""Most bytes that are moved, the heap first: moving copies them, some GiB a second."""
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def collapse_memory(setting: Path = _SETTING) -> int:
    """Move this process's memory to pages of 2 MiB; return how many bytes the kernel moved.

    setting: the kernel's file that says whether there are such pages
    """
    if not setting.exists() or "[never]" in setting.read_text():
        return 0
    libc, moved = ctypes.CDLL(None), 0
    in_use = (ctypes.c_ubyte * (_HUGE // _PAGE))()
    for start, end in _anonymous_memory():
        for at in range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
            piece = ctypes.c_void_p(at), ctypes.c_size_t(_HUGE)
            if libc.mincore(*piece, in_use) or sum(page & 1 for page in in_use) < _LEAST_IN_USE * len(in_use):
                continue
            if libc.madvise(*piece, _COLLAPSE) == 0:
                moved += _HUGE
            if moved >= _MOST:
                return moved
    return moved


def _anonymous_memory() -> Iterator[tuple[int, int]]:
    """Yield the address ranges of this process's own memory, without files, stacks and too large ranges."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        is_heap = name == ["[heap]"]
        if rights == "rw-p" and inode == "0" and (is_heap or (not name and end - start <= _LARGEST)):
            yield start, end
