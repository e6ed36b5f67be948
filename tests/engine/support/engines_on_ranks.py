"""Run prompts through an engine whose ranks are threads, or started in another way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.engine.support.oracle import random_ids

if TYPE_CHECKING:
    from engine.ranks.launcher import WorkerLauncher

GREEDY = SamplingParams(temperature=0, max_tokens=5)


PROMPTS = [random_ids(seed, length) for seed, length in enumerate((3, 40, 25, 61, 1))]


class Layout(NamedTuple):
    """How ranks share a model."""

    size: int
    """Ranks of each stage."""
    stages: int = 1
    parts: int = 1
    """Parts into which ranks with the same heads divide KV."""

    def __str__(self) -> str:
        return f"{self.stages}x{self.size}" + (f", {self.parts} parts" if self.parts > 1 else "")


def ranks_config(model: Path, layout: Layout | int, **settings: Any) -> EngineConfig:
    """Return the settings of a small engine with such ranks; a number: so many in one stage."""
    size, stages, parts = Layout(layout) if isinstance(layout, int) else layout
    defaults = {"device": "cpu", "page_size": 16, "kv_pages": 64, "max_step_tokens": 32, "max_running": 8}
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": stages, "context_parallel_size": parts}
    return EngineConfig(model=str(model), threads=1, **{**sizes, **defaults, **settings})


def run_on_ranks(
    model: Path,
    layout: Layout | int,
    prompts: Sequence[list[int]],
    params: SamplingParams = GREEDY,
    launcher: WorkerLauncher | None = None,
    **settings: Any,
) -> tuple[list[list[StreamDelta]], Engine]:
    """Run all prompts at once on such ranks (`ranks_config`); returns the results, and the engine, closed.
    `launcher`: None for threads.
    """
    from tests.engine.support.rank_processes import Threads  # imports msgspec, which a bare GPU machine lacks

    engine = Engine.from_config(ranks_config(model, layout, **settings), launcher=launcher or Threads())
    events: list[list[StreamDelta]] = [[] for _ in prompts]
    try:
        for index, prompt in enumerate(prompts):
            engine.loop.submit(engine.new_request(str(index), prompt, params))
        while engine.loop.has_work:
            for event in engine.loop.step():
                events[int(event.request_id)].append(event)
    finally:
        engine.close()
    return events, engine


def tokens_of_each(streams: Sequence[Sequence[StreamDelta]]) -> list[list[int]]:
    return [[token for event in events for token in event.token_ids] for events in streams]
