"""Moves the wall clock of processes that are started here, without root: `wall_clock.c` is preloaded into them.

What they see is what a machine's clock does when an operator or NTP steps it: `time.time()` jumps, and
`time.monotonic()` does not. Timers of the kernel that wait for a wall-clock time do not notice.
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


class WallClock:
    """The clock of all processes that were started while it was `preloaded`."""

    def __init__(self, directory: Path) -> None:
        """Compile into `directory`. Raises RuntimeError where that is not possible."""
        self._library, self._file = directory / "wall_clock.so", directory / "wall_clock"
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise RuntimeError("moving the wall clock takes a C compiler (cc or gcc, or the one that CC names)")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(self._library), str(SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{SOURCE.name} cannot be compiled here: {done.stderr}")
        self._file.write_bytes(bytes(8))

    def move(self, seconds: int) -> None:
        """Have the clock differ from the machine's by so many seconds."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", seconds))

    @contextlib.contextmanager
    def preloaded(self) -> Iterator[None]:
        """Have processes that are started meanwhile, and their descendants, use this clock."""
        before = os.environ.get("LD_PRELOAD", "")
        os.environ["LD_PRELOAD"] = f"{before}:{self._library}".lstrip(":")
        os.environ["RAYDIX_WALL_CLOCK"] = str(self._file)
        try:
            yield
        finally:
            del os.environ["RAYDIX_WALL_CLOCK"], os.environ["LD_PRELOAD"]
            if before:
                os.environ["LD_PRELOAD"] = before
