"""A model on several ranks gives the tokens that it gives on one, whatever its family and whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.plan import Event
from engine.sampling_params import SamplingParams
from tests.engine.oracle import FAMILIES, VOCAB, save_tiny
from tests.engine.parallel.ranks import Threads

GREEDY = SamplingParams(temperature=0, max_tokens=8)
Tiny = Callable[[str], Path]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            heads = {"llama2": 8, "mqa": 1}.get(family, 2)
            shape = {"num_attention_heads": 8, "num_key_value_heads": heads, "num_hidden_layers": 2}
            made[family] = save_tiny(family, tmp_path_factory.mktemp(family.replace(".", "_")), **shape)
        return made[family]

    return get


def ids_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


PROMPTS = [ids_of(seed, length) for seed, length in enumerate((3, 40, 25, 61, 1))]


def run(
    model: Path, size: int, prompts: Sequence[list[int]], params: SamplingParams = GREEDY, **settings: Any
) -> tuple[list[list[Event]], Engine]:
    """All prompts at once on `size` ranks, to the end, and the engine, closed."""
    defaults = {"device": "cpu", "page_size": 16, "kv_pages": 64, "max_step_tokens": 32, "max_running": 8}
    config = EngineConfig(model=str(model), threads=1, tensor_parallel_size=size, **{**defaults, **settings})
    engine = Engine.from_config(config, launcher=Threads())
    events: list[list[Event]] = [[] for _ in prompts]
    try:
        for index, prompt in enumerate(prompts):
            engine.loop.submit(engine.new_request(str(index), prompt, params))
        while engine.loop.has_work:
            for event in engine.loop.step():
                events[int(event.request_id)].append(event)
    finally:
        engine.close()
    return events, engine


def tokens(streams: Sequence[Sequence[Event]]) -> list[list[int]]:
    return [[token for event in events for token in event.token_ids] for events in streams]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same_greedy_tokens(tiny: Tiny, family: str, size: int) -> None:
    """On four ranks two key-value heads, or one, are held by several."""
    alone, _ = run(tiny(family), 1, PROMPTS)
    shared, _ = run(tiny(family), size, PROMPTS)
    assert tokens(shared) == tokens(alone)
