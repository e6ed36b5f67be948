"""After a step that failed, the engine computes one like it, which disturbs nobody, whatever the model keeps."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.base.errors import EngineBroken
from engine.program.engine import Engine
from engine.program.self_test import NAMESPACE, FailureCause, cause_of
from engine.values.plan import Step, StepPlan
from engine.values.pooling import Pooling
from engine.values.sampling_params import SamplingParams
from tests.engine.support.encoders import save_encoder
from tests.engine.support.oracle import oracle_greedy, random_ids, save_tiny
from tests.engine.support.whole_engines import GREEDY, engine_for, run_prompts, tokens_of

PROMPTS = [random_ids(seed, 40) for seed in range(4)]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"host_kv_gib": 2**-8},
    "qwen3_next": {"state_snapshots": 3},
    "gemma3": {"windowed_kv": "on"},
}


def is_test(plan: StepPlan) -> bool:
    return any(chunk.request.namespace == NAMESPACE for chunk in plan.chunks)


def fail_when(engine: Engine, find: Callable[[StepPlan], bool], error: Callable[[], Exception]) -> None:
    """Let steps fail in the midst of what they do: their KV is written, and no token is sampled."""
    runner: Any = engine.runner
    prepare = runner.prepare

    def prepared(plan: StepPlan) -> Step:
        step, fails = prepare(plan), find(plan)

        def run() -> Any:
            result = step()
            if fails:
                raise error()
            return result

        return run

    runner.prepare = prepared


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_after_a_failure_in_any_step_the_other_steps_are_right(family: str, overlap: bool, tmp_path: Path) -> None:
    model = save_tiny(family, tmp_path)
    right = [oracle_greedy(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    for number in (1, 2, 4, 9):
        limits = {"max_step_tokens": 48, "max_running": 3, "overlap": overlap, **MODELS[family]}
        engine = engine_for(model, 8, 480, **limits)
        num_steps = 0

        def is_due(plan: StepPlan) -> bool:
            nonlocal num_steps
            num_steps += not is_test(plan)
            return num_steps == number and not is_test(plan)  # noqa: B023

        fail_when(engine, is_due, lambda: RuntimeError("scripted failure"))
        for events, tokens in zip(run_prompts(engine, PROMPTS), right, strict=True):
            got = tokens_of(events)
            assert got == tokens[: len(got)]
            assert len(got) == len(tokens) or events[-1].error_code == "step_failed"
        assert sum(engine.loop.self_test.counts.values()) == 1 and not engine.loop.failing
        assert [tokens_of(events) for events in run_prompts(engine, PROMPTS)] == right
        assert engine.cache.account().free + engine.cache.account().evictable == engine.cache.num_pages
        engine.close()


def test_an_encoder_whose_step_failed_is_tested_too(tmp_path: Path) -> None:
    model = save_encoder("xlm_roberta", tmp_path)
    engine = engine_for(model, 8, 480, tasks=["embed"])
    due = [True]
    fail_when(engine, lambda plan: bool(due) and due.pop(), lambda: RuntimeError("scripted failure"))
    asked = SamplingParams(pooling=Pooling())
    [[failed]] = run_prompts(engine, [[5, 6, 7]], asked)
    [[ended]] = run_prompts(engine, [[5, 6, 7]], asked)
    assert (failed.error_code, ended.finish_reason, engine.loop.failing) == ("step_failed", "stop", "")


def test_offline_a_broken_engine_raises_an_error_instead_of_failing_every_prompt(tmp_path: Path) -> None:
    engine = engine_for(save_tiny("qwen3", tmp_path), 8, 480)
    fail_when(engine, lambda plan: True, MemoryError)
    with pytest.raises(EngineBroken, match="3 steps failed one after another, the last with MemoryError"):
        run_prompts(engine, PROMPTS)


def test_an_engine_without_memory_names_the_settings_to_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_for(save_tiny("qwen3", tmp_path), 8, 480)
    fail_when(engine, lambda plan: True, lambda: torch.OutOfMemoryError("CUDA out of memory."))
    settings = "lower kv_memory_share or kv_pages, or else max_step_tokens or max_running"
    with pytest.raises(EngineBroken, match=f"3 steps failed one after another, .*{settings}"):
        run_prompts(engine, PROMPTS)
    assert {settings in record.getMessage() for record in caplog.records} == {True}


CAUSES: list[tuple[BaseException, FailureCause]] = [
    (MemoryError(), "memory"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "memory"),
    (torch.AcceleratorError("CUDA error: out of memory"), "memory"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"), "memory"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "memory"),
    (RuntimeError("std::bad_alloc"), "memory"),
    (torch.AcceleratorError("CUDA error: device-side assert triggered"), "device"),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), "device"),
    (RuntimeError("HIP error: unspecified launch failure"), "device"),
    (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "device"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"), "other"),
    (OSError(errno.EMFILE, "Too many open files"), "other"),
    (RuntimeError("shape '[3, 4]' is invalid for input of size 9"), "other"),
    (AssertionError(), "other"),
]


@pytest.mark.parametrize(("error", "cause"), CAUSES)
def test_the_cause_of_a_failed_step_is_known_by_its_error(error: BaseException, cause: FailureCause) -> None:
    assert cause_of(error) == cause
