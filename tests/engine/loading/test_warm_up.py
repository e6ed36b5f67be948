"""No kernel compiles after an engine's start: the warm-up launches every variant that later steps ask for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.attention import cudnn
from engine.attention.reference import ReferenceAttention
from engine.loading import load_model
from engine.loading.devices import device_named
from engine.loading.warm_up import compile_kernels, warm_steps, warm_up
from engine.settings.config import EngineConfig
from engine.values.plan import StepPlan, StepResult
from tests.engine.support.oracle import save_tiny

pytest.importorskip("triton")


def test_random_steps_ask_for_no_kernel_that_the_warm_up_did_not() -> None:
    """Triton's own keys of the launches of 300 steps (fewer of other models), eager and recorded, of any sizes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.support.launch_keys"],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout)
    for report in reports.values():
        assert report["new"] == []
        assert report["warm"] > 15 and report["replayed"] > 20
    assert reports["recurrent"]["kinds"] == ["a few tokens a row", "decodes", "drafts", "pieces"]
    assert reports["dense"]["kinds"] == ["a few tokens a row", "decodes", "drafts", "pieces", "prompts"]


@pytest.mark.parametrize(
    ("max_step_tokens", "max_len", "longest"), [(300, 400, 300), (8192, 100, 99), (1, 50, 1), (64, 1, 1)]
)
def test_steps_are_as_long_as_any_and_stay_in_page_0(max_step_tokens: int, max_len: int, longest: int) -> None:
    steps = list(warm_steps(max_step_tokens, max_len, 16))
    chunks = [chunk for step in steps for chunk in step.chunks]
    assert max(chunk.num_tokens for chunk in chunks) == longest
    assert {page for chunk in chunks for page in chunk.pages} == {0}
    for step in steps:
        names = [chunk.request.request_id for chunk in step.chunks]
        assert len(set(names)) == len(names)
        sizes = [chunk.num_tokens for chunk in step.chunks]
        assert sizes == sorted(sizes), "decodes come first"


def test_where_cudnn_computes_prompts_a_prompt_of_each_planned_length_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the name of the attention and the warm-up are those of a GPU."""
    steps: list[StepPlan] = []
    monkeypatch.setattr(load_model, "warm_up", lambda runner, warm, device: steps.extend(warm))
    monkeypatch.setattr(cudnn, "SHORTEST", 16)
    monkeypatch.setattr(cudnn, "_MULTIPLE", 8)
    config = EngineConfig(
        str(save_tiny("qwen3", tmp_path)),
        device="cpu",
        attention="reference",
        kv_pages=8,
        max_step_tokens=45,
        max_running=4,
    )
    for name, more in (("cudnn,triton", [16, 24, 32, 40, 45]), ("reference", [])):
        monkeypatch.setattr(ReferenceAttention, "name", name)
        steps.clear()
        load_model.load_model(config)
        usual = len(list(warm_steps(45, 128, 16)))
        assert [chunk.num_tokens for step in steps[usual:] for chunk in step.chunks] == more


def test_a_cpu_is_not_warmed_up() -> None:
    class Runner:
        def run(self, plan: StepPlan) -> StepResult:
            raise AssertionError("no step is needed")

    for do in (compile_kernels, warm_up):
        do(Runner(), warm_steps(8, 8, 16), torch.device("cpu"))


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_named("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="device is 'cuda:2', but torch finds 2 CUDA devices, numbered from 0"):
        device_named("cuda:2")


@pytest.mark.parametrize("name", ["cuda:x", "cuda:", "cpu:1", "tpu", ""])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match='device must be "auto", "cpu", "cuda" or one of several GPUs'):
        device_named(name)
