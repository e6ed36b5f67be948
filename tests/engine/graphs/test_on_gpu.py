"""Real CUDA graphs, if there is a GPU: the same tokens as without, and steady steps never wait for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import CudaGraphs, DType, EngineConfig
from engine.engine import Engine
from engine.loading.load_model import load_model
from engine.scheduling.plan import StepPlan
from tests.engine.support.graph_workloads import greedy_request, last_chunk_of, play_greedily, play_workload
from tests.engine.support.oracle import save_tiny

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
    got, expected = (
        play_workload(Engine.from_config(config_for(model, each)), seed=1)[0] for each in (mode, "off")
    )
    assert set(got) == set(expected)
    for name in got:  # an abort strikes earlier or later
        length = min(len(got[name]), len(expected[name]))
        assert got[name][:length] == expected[name][:length]


@pytest.mark.parametrize("mode", ["start", "off"])
@pytest.mark.parametrize("attention", ["auto", "triton", "reference"])
def test_float32_gets_the_tokens_of_a_cpu(model: Path, mode: CudaGraphs, attention: str) -> None:
    configs = config_for(model, mode, "cuda", "float32", attention), config_for(model, "off", "cpu", "float32")
    got, expected = (play_greedily(Engine.from_config(config)) for config in configs)
    assert got == expected


def test_a_steady_step_is_launched_without_waiting_for_the_device(model: Path) -> None:
    runner = load_model(config_for(model, "start"))
    requests = [greedy_request(f"r{i}", 6) for i in range(3)]

    def prepared() -> StepPlan:
        return StepPlan(tuple(last_chunk_of(r, list(range(8 * i, 8 * i + 8))) for i, r in enumerate(requests)))

    def go_on() -> None:
        for r, token in zip(requests, runner.run(prepared()).token_ids, strict=True):
            r.tokens.append(token)

    for _ in range(3):
        go_on()
    assert runner._decodes is not None
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = runner._decodes.place(prepared(), runner._places)
        assert step is not None
        with torch.inference_mode():
            is_replayed = runner._decodes.forward(step, runner._sampled)
            sampled, _ = runner._decodes.sample(step, list)
            underway = runner._reader.begin(sampled)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert is_replayed and len(underway.wait()) == 3
