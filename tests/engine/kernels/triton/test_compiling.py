"""What the interpreter runs must also compile, and fit on a GPU: tried for some, without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from tests.engine.kernels.triton.compiling import CASES


def test_the_kernels_compile_for_gpus_and_fit_there(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.kernels.triton.compiling"],
        cwd=Path(__file__).parents[4],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 2 * len(CASES)
    assert [report for report in reports if report["shared"] > report["limit"]] == []
