"""On a GPU the thread that loads a model runs its steps: libraries keep plans and handles for each thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading import devices
from engine.program.engine import Engine
from engine.ranks import load_runner
from engine.settings.config import EngineConfig
from engine.values.plan import Step, StepPlan
from tests.engine.support.oracle import oracle_greedy, random_ids, save_tiny
from tests.engine.support.whole_engines import GREEDY, run_prompts, tokens_of

PROMPTS = [random_ids(seed, 40) for seed in range(3)]


@pytest.mark.parametrize("overlap", [None, True, False])
def test_the_thread_that_loaded_a_model_on_a_gpu_runs_its_steps(
    overlap: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is on the CPU. Only the choice of the thread sees a GPU."""
    loading: set[threading.Thread] = set()
    stepping: set[threading.Thread] = set()
    load = load_runner.load_runner

    def noted_load(*args: Any, **options: Any) -> Any:
        loading.add(threading.current_thread())
        return load(*args, **options)

    monkeypatch.setattr(load_runner, "load_runner", noted_load)
    monkeypatch.setattr(devices, "device_named", lambda name: torch.device("cuda"))
    model = save_tiny("qwen3", tmp_path)
    engine = Engine.from_config(EngineConfig(str(model), device="cpu", kv_pages=60, page_size=8, overlap=overlap))
    note_steps(engine, stepping)
    right = [oracle_greedy(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    assert [tokens_of(events) for events in run_prompts(engine, PROMPTS)] == right
    assert loading == stepping and len(stepping) == 1
    assert threading.current_thread() not in stepping
    engine.close()
    assert not any(thread.is_alive() for thread in stepping)


def note_steps(engine: Engine, stepping: set[threading.Thread]) -> None:
    """Note the threads in which steps run."""
    runner: Any = engine.runner
    prepare = runner.prepare

    def prepared(plan: StepPlan) -> Step:
        step = prepare(plan)

        def run() -> Any:
            stepping.add(threading.current_thread())
            return step()

        return run

    runner.prepare = prepared


def test_an_error_while_a_model_is_loaded_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "device_named", lambda name: torch.device("cuda"))
    model = save_tiny("qwen3", tmp_path)
    with pytest.raises(ValueError, match="no memory for KV pages"):
        Engine.from_config(EngineConfig(str(model), device="cpu", kv_memory_share=1e-12))
