"""Doubles that make a device late, and engines for tests that compare what it then computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu_sections.random_model import load_engine
from benchmarks.gpu_sections.shapes import MODELS, SMALL
from engine.attention.copy_streams import CudaStreams, StreamName
from engine.graphs.step_graphs import StepGraphs
from engine.program.engine import Engine
from engine.runner.model_runner import ModelRunner
from engine.runner.prepared_step import PreparedStep
from engine.runner.stage_clock import StageClock
from engine.sampling.sampler import sampler_for
from engine.settings.config import CudaGraphs
from engine.values.plan import StepResult, StepUnderway
from engine.values.sampling_row import SamplingRow
from tests.engine.support.devices import DEVICE

ON_GPU = DEVICE.type == "cuda"
GRAPHS: CudaGraphs = "start" if ON_GPU else "lazy"
"""Value of `cuda_graphs`: on a CPU, a double records steps when they first run (`record_as_on_gpus`)."""
_LATE_CYCLES = 5_000_000
"""About 3 ms of a GPU: longer than any step here."""
_LATE_S = 1e-3
_COPY_BYTES = 64 * 2**20
_WIDE = MODELS["llama-3.1-8b"] | {"num_hidden_layers": 2}


def random_engine(directory: Path, **settings: Any) -> Engine:
    """Return an engine with random weights: two layers of an 8B on a GPU, a tiny model on a CPU."""
    sizes: dict[str, Any] = {"kv_pages": 2000, "max_model_len": 512, "max_running": 64, "cuda_graphs": GRAPHS}
    raw = _WIDE if ON_GPU else SMALL["tiny"]
    return load_engine(raw, directory, **{"device": DEVICE.type, **sizes, **settings})


@contextmanager
def noted_logits() -> Iterator[list[torch.Tensor]]:
    """Note the logits of steps that the sampler itself samples, in engines that are loaded meanwhile."""
    seen: list[torch.Tensor] = []

    class Noting:
        def __init__(self, *args: Any) -> None:
            self._sampler = sampler_for(*args)

        def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Any:
            seen.append(logits.clone())
            return self._sampler.sample(logits, rows)

    with patch("engine.runner.model_runner.sampler_for", Noting):
        yield seen


@contextmanager
def counted_replays(kind: type[object] = object) -> Iterator[list[bool]]:
    """Note for each step with graphs whether one was replayed; only of graphs with sizes of this `kind`."""
    seen: list[bool] = []
    run = StepGraphs.run

    def counted(graphs: StepGraphs[Any], size: Any) -> bool:
        is_replayed = run(graphs, size)
        if isinstance(size, kind):
            seen.append(is_replayed)
        return is_replayed

    with patch.object(StepGraphs, "run", counted):
        yield seen


@contextmanager
def counted_prompts() -> Iterator[list[bool]]:
    """Note for each step with prompts whether it returned before its end was waited for."""
    seen: list[bool] = []
    compute = ModelRunner.compute

    def counted(runner: ModelRunner, step: PreparedStep) -> StepResult | StepUnderway:
        found = compute(runner, step)
        seen.append(not isinstance(found, StepResult))
        return found

    with patch.object(ModelRunner, "compute", counted):
        yield seen


@contextmanager
def busy_copies() -> Iterator[None]:
    """Copy from the host to a GPU all the time, on another stream."""
    if not ON_GPU:
        yield
        return
    end = threading.Event()
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        stream, target = torch.cuda.Stream(DEVICE), torch.empty_like(source, device=DEVICE)
        with torch.cuda.stream(stream):
            while not end.is_set():
                target.copy_(source, non_blocking=True)
                stream.synchronize()

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def be_late(times: int = 1) -> None:
    """Keep the current stream busy for longer than a step, or than some."""
    if ON_GPU:
        torch.cuda._sleep(_LATE_CYCLES * times)
    else:
        time.sleep(_LATE_S * times)


def late_steps() -> AbstractContextManager[object]:
    """Let the device begin each step late, when the host has prepared the next one."""
    begin = StageClock.begin_forward

    def begin_late(clock: StageClock) -> None:
        begin(clock)
        be_late()

    return patch.object(StageClock, "begin_forward", begin_late)


def late_copies(stream: StreamName) -> AbstractContextManager[object]:
    """Let each transfer on a copy stream of a GPU begin late."""
    on = CudaStreams.on

    def on_late(streams: CudaStreams, name: StreamName) -> AbstractContextManager[object]:
        if name == stream:
            with on(streams, name):
                be_late()
        return on(streams, name)

    return patch.object(CudaStreams, "on", on_late)


def poison(num_bytes: int) -> None:
    """Fill as much memory as that with NaN, and free it again."""
    blocks = [torch.full((2**26,), torch.nan, device=DEVICE) for _ in range(max(1, num_bytes >> 28))]
    del blocks


def eventually(condition: Callable[[], object], seconds: float) -> bool:
    """Wait up to `seconds` until a condition holds; returns whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
