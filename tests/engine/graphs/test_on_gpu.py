"""Real CUDA graphs, if there is a GPU: the same tokens as without, and steady steps never wait for the device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.loading.load_model import load_model
from engine.program.engine import Engine
from engine.settings.config import CudaGraphs, DType, EngineConfig
from engine.values.plan import StepPlan
from engine.values.sampling_params import SamplingParams
from tests.engine.support.graph_workloads import (
    assert_same_tokens,
    greedy_request,
    last_chunk_of,
    play_greedily,
    play_workload,
)
from tests.engine.support.oracle import VOCAB, save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("graphs"))


def config_for(
    model: Path, mode: CudaGraphs, device: str = "cuda", dtype: DType = "bfloat16", attention: str = "auto"
) -> EngineConfig:
    return EngineConfig(
        str(model),
        device=device,
        dtype=dtype,
        kv_pages=256,
        max_running=16,
        max_model_len=256,
        cuda_graphs=mode,
        attention=attention,
    )


@pytest.mark.parametrize("mode", ["start", "lazy"])
def test_workloads_get_the_tokens_of_steps_without_graphs(model: Path, mode: CudaGraphs) -> None:
    """In float32: in a graph a short prompt's tokens are rows, which round otherwise than a prompt's tiles."""
    got, expected = (
        play_workload(Engine.from_config(config_for(model, each, dtype="float32")), seed=1)[0]
        for each in (mode, "off")
    )
    assert_same_tokens(got, expected)


@pytest.mark.parametrize("mode", ["start", "off"])
@pytest.mark.parametrize("attention", ["auto", "triton", "reference"])
def test_float32_gets_the_tokens_of_a_cpu(model: Path, mode: CudaGraphs, attention: str) -> None:
    configs = config_for(model, mode, "cuda", "float32", attention), config_for(model, "off", "cpu", "float32")
    got, expected = (play_greedily(Engine.from_config(config)) for config in configs)
    assert got == expected


@pytest.mark.parametrize("mode", ["start", "off"])
def test_questions_after_a_long_prefix_get_the_tokens_of_a_cpu(tmp_path: Path, mode: CudaGraphs) -> None:
    """What they share is read once for all of their tokens, and for each other's; all of this is in one graph."""
    model = save_tiny("qwen3", tmp_path, max_position_embeddings=1024)
    greedily = SamplingParams(0.0, max_tokens=12, ignore_eos=True)
    prefix = [8 + 7 * at % (VOCAB - 8) for at in range(700)]
    got: list[dict[str, list[int]]] = []
    for config in (config_for(model, mode, "cuda", "float32"), config_for(model, "off", "cpu", "float32")):
        engine = Engine.from_config(replace(config, max_model_len=1024))
        tokens = defaultdict[str, list[int]](list)
        for number in range(12):  # The first computes the prefix; the others come two at a time.
            question = [8 + (number + 3 * at) % (VOCAB - 8) for at in range(1 + 9 * number)]
            engine.loop.submit(engine.new_request(f"r{number}", prefix + question, greedily))
            for event in engine.loop.step() if number % 2 == 0 else ():
                tokens[event.request_id] += event.token_ids
        while engine.loop.has_work:
            for event in engine.loop.step():
                tokens[event.request_id] += event.token_ids
        engine.loop.stop()
        got.append(tokens)
    assert got[0] == got[1] and len(got[0]) == 12


def test_a_steady_step_is_launched_without_waiting_for_the_device(model: Path) -> None:
    runner = load_model(config_for(model, "start"))
    requests = [greedy_request(f"r{i}", 6) for i in range(3)]

    def prepared() -> StepPlan:
        return StepPlan(tuple(last_chunk_of(r, list(range(8 * i, 8 * i + 8))) for i, r in enumerate(requests)))

    def run_step() -> None:
        for r, token in zip(requests, runner.run(prepared()).token_ids, strict=True):
            r.tokens.append(token)

    for _ in range(3):
        run_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = runner.place(prepared())
        assert step is not None
        underway = runner.replay(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    result = underway.wait()
    assert result.is_replayed and len(result.token_ids) == 3
