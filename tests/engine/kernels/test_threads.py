"""The native decoder gives the same bits on one thread and on several, whichever thread does which work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.kernels import native
from engine.models.native_decoder import NativeDecoder
from engine.runner.model_runner import ModelRunner
from engine.settings.config import DType
from engine.values.plan import StepPlan
from tests.engine.support.oracle import save_tiny
from tests.engine.support.steps_by_hand import RequestByHand, load_runner, pages_of, random_prompt

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 2}


def isas(dtype: torch.dtype) -> list[str]:
    """Return the kernels that are built for `dtype` and run on this processor."""
    try:
        best = native.kernels(dtype).isa
    except native.NativeUnavailable:
        return []
    usable = native.ISAS[: native.ISAS.index(best) + 1]
    return [isa for isa in usable if native.kernels(dtype, isa).isa == isa]


CASES = [
    (name, isa)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    for isa in isas(dtype)
]


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    native.forget()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("model"), **SHAPE)


def steps(runner: ModelRunner) -> torch.Tensor:
    """Return the logits of a long prompt and of three rows beside it: one decodes, two are new prompts."""
    a, b, c = (RequestByHand(random_prompt(n, n), pages_of(16, 128 * i, 120)) for i, n in enumerate((97, 1, 30)))
    first = runner.logits(StepPlan((a.chunk(),)))
    a.request.tokens.append(5)
    return torch.cat([first, runner.logits(StepPlan((a.chunk(), b.chunk(), c.chunk())))])


@pytest.mark.parametrize(("dtype", "isa"), CASES)
def test_any_number_of_threads_computes_the_same(
    model: Path, dtype: DType, isa: str, monkeypatch: pytest.MonkeyPatch, threads_as_before: None
) -> None:
    monkeypatch.setenv("RAYDIX_ISA", isa)
    native.forget()
    results = []
    for threads in (1, 2, 5):
        runner = load_runner(model, dtype=dtype)
        assert isinstance(runner.decoder, NativeDecoder) and runner.decoder._kernels.isa == isa
        torch.set_num_threads(threads)
        results.append(steps(runner))
    assert results[0].isfinite().all() and results[0].unique().numel() > 1
    assert all(torch.equal(other, results[0]) for other in results[1:])
