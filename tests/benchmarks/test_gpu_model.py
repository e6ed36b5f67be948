"""The model of decode steps on GPUs: kernels are counted on the engine's code, times follow from the formula."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("triton") is None:  # not imported here, as other tests set first that it interprets
    pytest.skip("Triton is not installed here", allow_module_level=True)


def test_steps_are_modelled_by_the_kernels_that_the_engine_launches() -> None:
    """A layer is ten kernels; in fp8 it is one more, which rounds what attention returns. Twelve lie beside."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_model", "--gpu", "h200", "--context", "1000"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    kernels = {(model, weights): int(count) for model, weights, _, count, *_ in rows}
    assert kernels["llama-3.1-8b", "bfloat16"] == 32 * 10 + 12
    assert kernels["llama-3.1-8b", "fp8"] == 32 * 11 + 12
    assert kernels["qwen3-0.6b", "bfloat16"] == 28 * 10 + 12
    for _, _, _, count, ms, least, share in rows:
        assert float(ms) == pytest.approx(float(least) / 0.9 + int(count) * 0.0012, abs=0.01)
        assert float(share.rstrip("%")) == pytest.approx(100 * float(least) / float(ms), abs=3)
    eight_b = [row for row in rows if row[:3] == ["llama-3.1-8b", "bfloat16", "1"]]
    weight_bytes, kv_bytes = 2 * 7.504e9, 1000 * 32 * 2 * 8 * 128 * 2
    assert float(eight_b[0][5]) == pytest.approx((weight_bytes + kv_bytes) / 4.8e9, rel=0.01)
