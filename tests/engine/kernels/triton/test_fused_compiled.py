"""The fused operations and the sampler compile for a GPU, wherever the tests run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
KERNELS = "_add_norm _best _change _draw _rotate_into _rotation _silu_mul _weigh collect find_bounds find_cuts"


def test_kernels_compile(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.kernels.triton.compile_fused"],
        cwd=Path(__file__).parents[4],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == KERNELS.split()
