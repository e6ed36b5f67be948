"""Processes that were started with clocks that can be moved see theirs jump; the monotonic clock does not."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.wall_clock import WallClocks

TELL = """
import sys, time
for line in sys.stdin:
    print(time.time(), time.monotonic(), flush=True)
"""


@contextlib.contextmanager
def started(clocks: WallClocks) -> Iterator[subprocess.Popen[str]]:
    with clocks.preloaded():
        command = [sys.executable, "-c", TELL]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def read(process: subprocess.Popen[str]) -> tuple[float, float]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("tell\n")
    process.stdin.flush()
    wall, monotonic = map(float, process.stdout.readline().split())
    return wall, monotonic


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="takes Linux and a C compiler")
def test_a_process_sees_its_wall_clock_jump_and_others_do_not(tmp_path: Path) -> None:
    clocks = WallClocks(tmp_path)
    with started(clocks) as moved, started(clocks) as other:
        read(moved)
        for seconds in (0, 3600, -3600, 0):
            assert clocks.move(moved.pid, seconds)
            wall, monotonic = read(moved)
            assert wall - time.time() == pytest.approx(seconds, abs=300)
            assert monotonic == pytest.approx(time.monotonic(), abs=300)
            assert read(other)[0] == pytest.approx(time.time(), abs=300)
    assert not clocks.move(2**22 + 1, 5)


def test_a_missing_compiler_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(RuntimeError, match="C compiler"):
        WallClocks(tmp_path)
