"""Mixtures of experts in the native decoder, beside torch's, for each instruction set of this processor."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels import native
from engine.models.native_decoder import NativeDecoder
from engine.settings.config import DType
from engine.values.plan import StepPlan
from tests.engine.support.oracle import random_ids, save_tiny
from tests.engine.support.steps_by_hand import RequestByHand, load_runner

_NAMES: dict[torch.dtype, DType] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_PROMPTS = [random_ids(seed, length) for seed, length in enumerate((1, 40, 200, 9))]
_KINDS = {
    "shares": ("qwen3_moe_plain", {}),
    "sigmoids": ("glm4_moe_groups", {}),
    "clamped": ("gpt_oss", {}),
    "many": ("mixtral", {"num_local_experts": 70, "num_experts_per_tok": 9}),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Load the library by the test's own environment."""
    native.forget()
    yield
    native.forget()


@pytest.fixture(scope="module", params=_KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = _KINDS[request.param]
    return save_tiny(family, tmp_path_factory.mktemp("model"), num_hidden_layers=2, **changes)


def logits_of(directory: Path, prompts: list[list[int]], dtype: DType, **settings: Any) -> torch.Tensor:
    """The logits after each prompt, all of which are computed in one step."""
    runner = load_runner(directory, kv_tokens=1024, dtype=dtype, **settings)
    assert isinstance(runner.decoder, NativeDecoder) == ("attention" not in settings)
    rows = [RequestByHand(prompt, range(1 + 13 * row, 14 + 13 * row)) for row, prompt in enumerate(prompts)]
    return runner.logits(StepPlan(tuple(row.chunk() for row in rows)))


def test_logits_are_those_of_torch(kernels: native.Kernels, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, experts whose scores are nearly equal may be chosen differently, so the mean is compared."""
    monkeypatch.setenv("RAYDIX_ISA", kernels.isa)
    expected = logits_of(model, _PROMPTS, "float32", attention="reference")
    got = logits_of(model, _PROMPTS, _NAMES[kernels.dtype])
    if kernels.dtype == torch.float32:
        assert (got - expected).abs().max() < 1e-4
    else:
        assert (got - expected).abs().mean() < 0.1 * expected.abs().mean()


def test_the_other_rows_of_a_batch_change_no_bit(
    kernels: native.Kernels, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYDIX_ISA", kernels.isa)
    together = logits_of(model, _PROMPTS, _NAMES[kernels.dtype])
    for prompt, expected in zip(_PROMPTS, together, strict=True):
        assert torch.equal(logits_of(model, [prompt], _NAMES[kernels.dtype])[0], expected)


_CROWDED = """
import sys
from engine.settings.config import EngineConfig
from engine.loading.load_model import load_model
from engine.values.plan import StepPlan
from tests.engine.support.steps_by_hand import RequestByHand

runner = load_model(EngineConfig(model=sys.argv[1], dtype="float32", page_size=16, kv_pages=64, threads=16))
request = RequestByHand([1, 2, 3], range(1, 60))
steps = StepPlan((request.chunk(),))
print(len({tuple(runner.logits(steps)[0].tolist()) for _ in range(150)}))
"""


def test_threads_that_come_late_read_no_results_of_later_layers(tmp_path: Path) -> None:
    """With far more threads than cores, some enter a phase when the others are layers ahead."""
    directory = save_tiny("gpt_oss", tmp_path, num_hidden_layers=12)
    done = subprocess.run(
        [sys.executable, "-c", _CROWDED, str(directory)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr[-2000:]


@pytest.mark.parametrize("dtype", _NAMES.values())
def test_weights_of_eight_bits_are_close(model: Path, dtype: DType) -> None:
    """All but the router, on whose small differences a token's experts depend."""
    plain = logits_of(model, _PROMPTS, dtype)
    rounded = logits_of(model, _PROMPTS, dtype, quantization="int8")
    assert not torch.equal(rounded, plain)
    assert (rounded - plain).abs().mean() < 0.2 * plain.abs().mean()
