"""The kernels that the interpreter runs also compile for several GPUs and fit there, even without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from engine.kernels.triton.expert_products import _BLOCKS, _FP8
from engine.kernels.triton.launch_config import programs_per_sm

PRODUCTS = {
    "cascade._attend_shared",
    "decode._attend",
    "delta_prompts._advance",
    "delta_prompts._learn",
    "extend._extend",
    "extend_tma._extend_tma",
    "few_rows._few_rows",
    "fp8_gemm._block_gemm",
    "grouped_gemm._gate_up",
    "grouped_gemm._down",
    "int4_gemm._int4_gemm",
}
"""Kernels with matrix products."""
BY_TMA = "extend_tma._extend_tma"
"""The kernel that copies boxes, with accumulators that fill a thread's registers."""
_SHARED_OF_SM_KIB = {90: 228, 100: 228}
"""What all programs of a multiprocessor have together, by compute capability."""
_EIGHT_BITS = {
    90: "wgmma.mma_async.sync.aligned.m64n{}k32.f32.e4m3.e4m3",
    100: "tcgen05.mma.cta_group::1.kind::f8f6f4",
}
"""The instruction that multiplies float8 numbers, by compute capability, and the outputs of a program."""
_OF_EXPERTS = {
    80: ("mma.sync", r"(b?f16)\.\1", r"bf16\.bf16"),
    86: ("mma.sync", r"bf16\.bf16", ""),
    89: ("mma.sync", "", r"e4m3\.e4m3"),
    90: ("wgmma.mma_async", r"bf16\.bf16", r"e4m3\.e4m3"),
    100: ("tcgen05.mma", "kind::f16", "kind::f8f6f4"),
}
"""The instruction that multiplies experts, by compute capability, with its types, and with those of float8."""
_EARLY = {
    "cascade._attend_shared",
    "decode._attend",
    "delta_net._advance",
    "delta_net._convolve",
    "delta_net._gate",
    "delta_net._strengths",
    "delta_prompts._advance",
    "delta_prompts._convolve",
    "delta_prompts._keep",
    "delta_prompts._learn",
    "expert_tiles._count",
    "expert_tiles._place",
    "few_rows._few_rows",
    "fp8._round_rows",
    "fp8_gemm._block_gemm",
    "grouped_gemm._combine",
    "grouped_gemm._down",
    "grouped_gemm._gate_up",
    "int4_gemm._int4_gemm",
    "merge._merge",
    "norm._add_norm",
    "rope._rotate_into",
    "rope._rotations",
    "route._route",
    "rows._enter",
    "rows._leave",
    "sample._best",
    "sample._draw",
    "sample._weigh",
    "shared_prefixes._form",
    "shared_prefixes._prefer",
    "silu._gate_mul",
    "work_list._build",
}
"""Kernels that are launched before the kernel before them has ended, from compute capability 9.0 on."""
_TENSOR_CORES = 80
"""Compute capability from which Triton uses tensor cores; on earlier GPUs it multiplies number by number."""


def _check_experts(launch: dict[str, Any]) -> None:
    """Experts in float8 are multiplied as such where GPUs can, all others in 16 bits, by what each generation has
    for it; and registers hold what a program needs.
    """
    instruction, types, types_of_float8 = _OF_EXPERTS[launch["capability"]]
    is_float8 = launch["with"]["KIND"] in (_FP8.value, _BLOCKS.value)
    [found] = launch["products"]
    assert found.startswith(instruction), launch
    assert re.search(types_of_float8 if is_float8 else types, found), launch
    assert launch["stack"] <= 8, launch


def test_kernels_compile_for_gpus_and_fit_there(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.support.compile_triton"],
        cwd=Path(__file__).parents[4],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DISABLE_LINE_INFO": "1"},  # it takes a tenth
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
        is_early = launch["kernel"] in _EARLY and launch["capability"] >= 90
        assert launch["is_launched_early"] == launch["waits"] == is_early, launch
        if launch["kernel"] == "fp8_gemm._block_gemm":
            expected_product = _EIGHT_BITS[launch["capability"]].format(launch["with"]["BLOCK_N"])
            assert launch["products"] == [expected_product], launch
        if launch["kernel"] in ("grouped_gemm._gate_up", "grouped_gemm._down"):
            _check_experts(launch)
        attends = launch["kernel"] in ("decode._attend", "cascade._attend_shared")
        if attends and launch["capability"] in _SHARED_OF_SM_KIB:
            shared = _SHARED_OF_SM_KIB[launch["capability"]] * 1024
            widens = launch["widens"] or launch["kernel"] == "cascade._attend_shared"
            threads = 32 * launch["with"]["num_warps"]
            beside = programs_per_sm(launch["shared"] + 1024, shared, widens=widens, threads=threads)
            assert beside * threads * launch["registers"] <= 65_536, launch
            assert not launch["with"]["REST"] or launch["stack"] <= 64, launch
