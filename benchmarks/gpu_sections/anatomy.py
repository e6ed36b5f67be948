"""The parts of a decode step, each timed by itself: its graphs, the products of its layers, and attention.

    step       as the engine runs it: the time between two tokens
    replay     its graph up to the logits, replayed again and again
    sampler    the graph that chooses tokens
    gap        what is left of the step: the device waits for the host

All of it is timed without a profiler, which would make each kernel wait for the one before. Products have a graph
of their own, and so has attention, without the kernels between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.gpu_sections.attention_cases import make_case
from benchmarks.gpu_sections.drive import drive
from benchmarks.gpu_sections.engine_runs import SAMPLED, Runs
from benchmarks.gpu_sections.limits import Limits
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.timing import num_copies, recorded_seconds_of, seconds_of
from benchmarks.gpu_sections.workload import Workload
from engine.attention.base import AttentionShape
from engine.graphs.step_graphs import DecodeSize, StepGraphs
from engine.layers.linear import PlainLinear
from engine.models.decoder import Decoder
from engine.runner.model_runner import ModelRunner

_REPLAYS = 30


def anatomy(model: str, runs: Runs, limits: Limits, work: Workload, device: torch.device) -> Iterator[Measurement]:
    """Lines for each number of rows, with their shares of what each part reads and computes."""
    runner = cast(ModelRunner, runs.engine.runner)
    for rows in work.anatomy:
        prompts = [work.prompt(row, work.context - work.decoded // 2) for row in range(rows)]
        drive(runs.engine, prompts, [1] * rows)
        with _noted_graphs() as graphs:
            trace = drive(runs.engine, prompts, [work.decoded] * rows, SAMPLED)
        step = runs.decoded(rows, trace)
        what = f"anatomy, {rows} row{'s' * (rows > 1)}"
        yield replace(step, what=f"{what}: step", aim=None)
        left = None if step.ms is None else step.ms
        for name, replay in graphs.items():
            milliseconds = 1000 * seconds_of(replay, device, tries=3, calls=_REPLAYS)
            left = None if left is None else left - milliseconds
            yield Measurement(f"{what}: {name}", model, ms=milliseconds)
        if not graphs:
            yield Measurement(f"{what}: replay", model, note="left out: no graph was replayed")
        elif left is not None and step.ms is not None:
            yield Measurement(f"{what}: gap", model, ms=left, note=f"{left / step.ms:.1%} of the step")
        for name, call in _products(runner, rows, device):
            seconds = recorded_seconds_of([call], device)  # Its weights are more than the cache holds.
            shares = limits.shares(partial(Limits.decode, rows=rows, kv_tokens=0), seconds)
            yield Measurement(f"{what}: {name}", model, ms=1000 * seconds, **shares)
        yield _attention(f"{what}: attention", model, runner, rows, limits, work)


@contextmanager
def _noted_graphs() -> Iterator[dict[str, Callable[[], object]]]:
    """Note the graphs that steps replay meanwhile: the last one of each kind, by its name."""
    found: dict[str, Callable[[], object]] = {}
    run = StepGraphs.run

    def noting(graphs: StepGraphs[Any], size: Any) -> bool:
        is_replayed = run(graphs, size)
        if is_replayed:
            # Replays of a forward pass write the same KV again; those of a sampler advance rows that have ended.
            found["replay" if isinstance(size, DecodeSize) else "sampler"] = partial(run, graphs, size)
        return is_replayed

    with patch.object(StepGraphs, "run", noting):
        yield found


def _products(runner: ModelRunner, rows: int, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield all products of a step: by the kernels that the engine has chosen, and by the library's only."""
    decoder = runner.decoder
    if not isinstance(decoder, Decoder):
        return
    weight = decoder.embed.weight
    plain = [layer for layer in decoder.modules() if isinstance(layer, torch.nn.Linear | PlainLinear)]
    widths = {layer.in_features for layer in plain}
    inputs = {size: torch.randn(rows, size, device=device).to(weight.dtype) for size in widths}

    def chosen() -> None:
        for layer in plain:
            layer(inputs[layer.in_features])

    def library() -> None:
        for layer in plain:
            F.linear(inputs[layer.in_features], layer.weight)

    yield "products", torch.inference_mode()(chosen)
    yield "products by the library", torch.inference_mode()(library)


def _attention(
    what: str, model: str, runner: ModelRunner, rows: int, limits: Limits, work: Workload
) -> Measurement:
    """Attention in all layers, over pages that the cache does not hold."""
    config, dtype = runner.model_config, runner.kv_dtype
    shape = AttentionShape.of(config.attention, config.windows, runner.page_size, runner.kv_dtype)
    per_layer = rows * work.context * limits.size.kv_per_token * limits.bytes.kv / config.num_layers
    calls = []
    for _ in range(num_copies(per_layer, runner.device)):
        case = make_case([(work.context - 1, 1)] * rows, shape, None, dtype, runner.device)
        calls.append(partial(runner.attention.prepare(case.batch, case.null_page).attend, *case[2:]))
    seconds = config.num_layers * recorded_seconds_of(calls, runner.device)
    num_bytes = config.num_layers * per_layer
    shares = limits.shares(lambda some: some.rates.least(num_bytes), seconds)
    return Measurement(what, model, runner.attention_name, ms=1000 * seconds, **shares)
