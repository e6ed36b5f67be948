"""What the interpreter runs, a GPU's compiler takes too, and it fits into the shared memory of small GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
SCRIPT = "tests.engine.kernels.triton.compile_experts"


def test_the_experts_kernels_compile_for_gpus() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", SCRIPT], env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert {name for name, *_ in lines} == {"_gate_up", "_down", "_combine", "_count", "_place"}
    for name, taken, limit, has_products in lines:
        assert int(taken) <= int(limit), name
        assert (has_products == "True") == (name in ("_gate_up", "_down"))
