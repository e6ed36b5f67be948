"""What a process holds moves to pages of 2 MiB, where the kernel makes such, and is what it was."""

from __future__ import annotations

import ctypes
import json
import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.base.huge_pages import collapse_memory

MIB = 2**20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this kernel makes no pages of 2 MiB"
)


def memory(size: int, filled: int) -> tuple[mmap.mmap, int]:
    """Return private memory, of which the beginning has been written, and its address."""
    made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made[:filled] = bytes(range(256)) * (filled // 256)
    return made, ctypes.addressof(ctypes.c_char.from_buffer(made))


def in_huge_pages(address: int) -> int:
    """Return the bytes in such pages of the memory that has this address, or lies beside it."""
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(bound, 16) for bound in part.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            found = re.search(r"AnonHugePages: +(\d+) kB", part)
            assert found is not None
            return 1024 * int(found[1])
    raise AssertionError("there is no such memory")


def moves(address: int) -> bool:
    """Ask the kernel to move the 2 MiB that begin at this address or after it; return whether it did."""
    return not ctypes.CDLL(None).madvise(ctypes.c_void_p(-(-address // (2 * MIB)) * 2 * MIB), 2 * MIB, 25)


def move() -> dict[str, int]:
    """Move this process's memory and return how much the kernel moved, of one mapping and of all."""
    used, address = memory(16 * MIB, 16 * MIB)
    can_move = moves(address)
    before, moved = in_huge_pages(address), collapse_memory()
    assert used[:] == bytes(range(256)) * (16 * MIB // 256)
    return {
        "can_move": can_move,
        "mapping": in_huge_pages(address) - before,
        "moved": moved,
        "can_move_more": moves(address + 8 * MIB),
    }


def test_memory_in_use_is_moved_and_memory_that_is_not_stays_absent() -> None:
    """In a new process: one that has run other tests may hold more than is moved at a start."""
    ask = f"import json, {__name__} as here; print(json.dumps(here.move()))"
    seen = json.loads(subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True).stdout)
    if not seen["can_move"]:
        pytest.skip("this kernel does not move memory when asked")
    if not seen["mapping"] and not seen["can_move_more"]:
        pytest.skip("this kernel's memory is in pieces, so that it has no more pages of 2 MiB")
    assert seen["mapping"] >= 2 * MIB and seen["moved"] >= 2 * MIB


def test_memory_that_is_hardly_used_does_not_grow() -> None:
    hardly, address = memory(16 * MIB, MIB)
    collapse_memory()
    resident = (ctypes.c_ubyte * (16 * MIB // 4096))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(16 * MIB), resident) == 0
    assert sum(page & 1 for page in resident) <= (MIB + 2 * MIB) // 4096
    assert hardly[:256] == bytes(range(256))


@pytest.mark.parametrize("content", ["always madvise [never]", None])
def test_nothing_is_moved_where_the_kernel_has_no_such_pages(tmp_path: Path, content: str | None) -> None:
    _, address = memory(16 * MIB, 16 * MIB)
    before, setting = in_huge_pages(address), tmp_path / "enabled"
    if content is not None:
        setting.write_text(content)
    assert collapse_memory(setting) == 0
    assert in_huge_pages(address) == before
