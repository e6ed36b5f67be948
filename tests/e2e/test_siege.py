"""The application besieged: each kind of attack once, beside honest streams whose every token is known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.support.markdown_pages import ROOT

pytestmark = pytest.mark.e2e

ATTACKERS = ("random requests", "bodies", "floods", "wire", "metrics port", "kills", "clocks")
"""Without those whose attacks wait for minutes of patience: `python -m benchmarks.siege` has all."""


def test_honest_streams_are_right_and_nothing_is_left_when_everything_is_attacked(tmp_path: Path) -> None:
    """It ends when each attacker has done all that it can, however long that takes."""
    path = tmp_path / "report.json"
    size = ["--engines", "2", "--streams", "2", "--asks", "6", "--connections", "40"]
    command = [sys.executable, "-m", "benchmarks.siege", "--turns", "1", "--seed", "1", *size]
    run = subprocess.run(
        [*command, "--attackers", ",".join(ATTACKERS), "--json", str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["rounds"].keys() == set(ATTACKERS) and all(report["rounds"].values())
    assert report["streams"]["num_whole"] > 0 and not report["violations"]
