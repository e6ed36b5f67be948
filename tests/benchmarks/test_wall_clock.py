"""Processes that were started under a moved wall clock see it move, and the monotonic clock does not."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.wall_clock import WallClock

TELL = """
import sys, time
for line in sys.stdin:
    print(time.time(), time.monotonic(), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="takes Linux and a C compiler")
def test_a_process_sees_its_wall_clock_jump(tmp_path: Path) -> None:
    clock = WallClock(tmp_path)
    with clock.preloaded():
        command = [sys.executable, "-c", TELL]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    with process:
        for seconds in (0, 3600, -3600, 0):
            clock.move(seconds)
            process.stdin.write("tell\n")
            process.stdin.flush()
            wall, monotonic = map(float, process.stdout.readline().split())
            assert wall - time.time() == pytest.approx(seconds, abs=300)
            assert monotonic == pytest.approx(time.monotonic(), abs=300)
        process.stdin.close()


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(RuntimeError, match="C compiler"):
        WallClock(tmp_path)
