"""Moves the wall clocks of Python processes that are started here, without root: `wall_clock.c` is preloaded.

Their code sees what a machine's clock does when an operator or NTP steps it: `time.time()` jumps, and
`time.monotonic()` does not. Each process has a clock of its own, as those of different machines have.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


class WallClocks:
    """The clocks of all processes that were started while they were `preloaded`."""

    def __init__(self, directory: Path) -> None:
        """Compile into `directory`, which outlives the processes. Raises RuntimeError without a compiler."""
        self._library, self._clocks = directory / "wall_clock.so", directory / "clocks"
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise RuntimeError("moving wall clocks takes a C compiler: cc, gcc or the one that CC names")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(self._library), str(SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{SOURCE.name} cannot be compiled here: {done.stderr}")
        self._clocks.mkdir()

    def move(self, pid: int, seconds: int) -> bool:
        """Have a process's clock differ from the machine's by so many seconds; return whether it has one."""
        try:
            with (self._clocks / str(pid)).open("r+b") as file:
                file.write(struct.pack("=q", seconds))
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def preloaded(self) -> Iterator[None]:
        """Give clocks that can be moved to Python processes that are started meanwhile, and their descendants."""
        before = os.environ.get("LD_PRELOAD", "")
        os.environ["LD_PRELOAD"] = f"{before}:{self._library}".lstrip(":")
        os.environ["RAYDIX_WALL_CLOCKS"] = str(self._clocks)
        try:
            yield
        finally:
            del os.environ["RAYDIX_WALL_CLOCKS"], os.environ["LD_PRELOAD"]
            if before:
                os.environ["LD_PRELOAD"] = before
