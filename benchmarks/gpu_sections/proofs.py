"""Tests that need a GPU, as checks of the run: a line for each, when it has ended."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_sections.messages import Inapplicable, Measurement

ROOT = Path(__file__).resolve().parents[2]
FILE = "tests/engine/test_on_gpu.py"
_NEEDED = ("pytest", "hypothesis")
_ENDED = re.compile(r"^(?:\S+::)(\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b")


def proofs(which: str) -> Iterator[Measurement]:
    """Run the tests of `FILE` with such names, as for pytest's `-k`. Raises RuntimeError if pytest cannot."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise Inapplicable(f"{' and '.join(missing)} not installed")
    command = [sys.executable, "-m", "pytest", FILE, "-vv", "-k", which, "-p", "no:cacheprovider", "--color=no"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    began, last = time.perf_counter(), ""
    for line in process.stdout:
        print(line, end="", file=sys.stderr, flush=True)
        last = line.strip() or last
        if (found := _ENDED.match(line)) is not None:
            now = time.perf_counter()
            name, end = found.groups()
            passed = None if end == "SKIPPED" else end == "PASSED"
            yield Measurement(
                f"proof: {name}", by="pytest", ms=1000 * (now - began), passed=passed, note=end.lower()
            )
            began = now
    if process.wait() not in (0, 1):  # 1: some failed, which are named above.
        raise RuntimeError(f"pytest ended with status {process.returncode}: {last}")
