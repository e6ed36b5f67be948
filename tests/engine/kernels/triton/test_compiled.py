"""The kernels that the interpreter runs also compile for several GPUs and fit there, even without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from engine.kernels.triton.launch_config import DECODE_THREADS, programs_per_sm

PRODUCTS = {
    "decode._attend",
    "extend._extend",
    "extend_tma._extend_tma",
    "grouped_gemm._gate_up",
    "grouped_gemm._down",
    "int4_gemm._int4_gemm",
}
"""Kernels with matrix products."""
BY_TMA = "extend_tma._extend_tma"
"""The kernel that copies boxes, with accumulators that fill a thread's registers."""
_SHARED_OF_SM_KIB = {90: 228, 100: 228}
"""What all programs of a multiprocessor have together, by compute capability."""
_TENSOR_CORES = 80
"""Compute capability from which Triton uses tensor cores; on earlier GPUs it multiplies number by number."""


def test_kernels_compile_for_gpus_and_fit_there(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.support.compile_triton"],
        cwd=Path(__file__).parents[4],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    launches = report["launches"]
    assert sorted({launch["kernel"] for launch in launches}) == report["entry_points"]
    for launch in launches:
        assert launch["shared"] <= launch["limit"], launch
        expected = launch["kernel"] in PRODUCTS and launch["capability"] >= _TENSOR_CORES
        assert launch["has_products"] == expected, launch
        assert launch["has_tma"] == (launch["kernel"] == BY_TMA), launch
        assert launch["kernel"] != BY_TMA or not launch["stack"], launch
        if launch["kernel"] == "decode._attend" and launch["capability"] in _SHARED_OF_SM_KIB:
            shared = _SHARED_OF_SM_KIB[launch["capability"]] * 1024
            beside = programs_per_sm(launch["shared"] + 1024, shared, widens=launch["widens"])
            assert beside * DECODE_THREADS * launch["registers"] <= 65_536, launch
