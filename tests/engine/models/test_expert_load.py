"""The load of experts: the tokens of each are counted, without padding, and their ranks compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.loading.load_model import load_model
from engine.models.decoder import Decoder
from engine.models.expert_load import ExpertLoad
from engine.program.engine import Engine
from engine.runner.model_runner import ModelRunner
from engine.settings.config import EngineConfig
from engine.values.plan import Chunk, StepPlan
from tests.engine.support import recorded_graphs
from tests.engine.support.engines_on_ranks import PROMPTS, run_on_ranks, tokens_of_each
from tests.engine.support.graph_workloads import greedy_request, last_chunk_of
from tests.engine.support.oracle import Tiny, tiny_models
from tests.engine.support.recorded_graphs import graphed

CPU = torch.device("cpu")


PER_TOKEN = {"mixtral": 2, "qwen3_moe_mixed": 3, "gemma4_moe": 3}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_models(tmp_path_factory, lambda family: {"num_local_experts": 4} if family == "mixtral" else {})


def loads_of(engine: Engine) -> ExpertLoad:
    load = getattr(engine.runner, "expert_load", None)
    assert isinstance(load, ExpertLoad)
    return load


def load_of(num_ranks: int, *steps: list[list[int]]) -> ExpertLoad:
    """The load of eight experts after steps, each with the experts of its tokens in two layers."""
    load = ExpertLoad(2, 8, num_ranks, CPU)
    layers = [load.of_layer(0), load.of_layer(1)]
    for step in steps:
        for layer, chosen in zip(layers, step, strict=True):
            layer(torch.tensor(chosen).view(-1, 1))
        load.add(torch.arange(len(step[0])))
    return load


def test_each_layers_tokens_are_counted_over_steps() -> None:
    load = load_of(2, [[0, 0, 7], [1, 2, 3]], [[0], [3]])
    assert load.counts.tolist() == [[3, 0, 0, 0, 0, 0, 0, 1], [0, 1, 1, 2, 0, 0, 0, 0]]


def test_the_imbalance_is_the_mean_over_layers_of_the_busiest_ranks_share() -> None:
    """Layer 0: one of two ranks gets all tokens. Layer 1: three of four tokens."""
    load = load_of(2, [[0, 1, 2, 3] * 300, [0, 1, 2, 7] * 300])
    assert load.imbalance() == (2.0 + 1.5) / 2
    even = load_of(4, [[0, 2, 4, 6] * 300, [1, 3, 5, 7] * 300])
    assert even.imbalance() == 1.0


def test_few_tokens_have_no_imbalance_and_old_ones_are_not_counted_again() -> None:
    load = ExpertLoad(1, 2, 2, CPU)

    def step(expert: int, count: int) -> None:
        load.of_layer(0)(torch.full((count, 1), expert))
        load.add(torch.arange(count))

    step(0, 1000)
    assert load.imbalance() is None
    step(1, 1000)
    assert load.imbalance() == 1.0
    step(0, 1000)
    assert load.imbalance() == 1.0, "of the tokens before"
    step(0, 24)
    assert load.imbalance() == 2.0


@pytest.mark.parametrize("family", PER_TOKEN)
def test_engines_on_ranks_count_every_token_that_they_compute(tiny: Tiny, family: str) -> None:
    """Of 8 tokens that a request gets, the first comes from its prompt, and the last is not computed."""
    streams, engine = run_on_ranks(tiny(family), 2, PROMPTS, expert_parallel=True)
    load = loads_of(engine)
    num_tokens = sum(map(len, PROMPTS)) + sum(len(tokens) - 1 for tokens in tokens_of_each(streams))
    assert load.counts.sum(1).tolist() == [num_tokens * PER_TOKEN[family]] * len(load.counts)
    assert load.counts.max() > load.counts.min()


def test_nothing_is_counted_where_each_rank_has_a_part_of_each_expert(tiny: Tiny) -> None:
    _, engine = run_on_ranks(tiny("mixtral"), 2, PROMPTS[:1])
    assert getattr(engine.runner, "expert_load") is None  # noqa: B009


def test_recorded_steps_count_the_same_tokens_as_others(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is not counted: three rows are in a graph of four, and ten tokens in one of 16."""
    shape: dict[str, Any] = {
        "page_size": 4,
        "kv_pages": 64,
        "max_running": 7,
        "max_step_tokens": 24,
        "max_model_len": 80,
    }
    config = EngineConfig(str(tiny("mixtral")), device="cpu", attention="reference", threads=1, **shape)

    def counting(config: EngineConfig) -> ModelRunner:
        runner = load_model(config)
        assert isinstance(runner.decoder, Decoder)
        runner.decoder.count_experts()
        return runner

    monkeypatch.setattr(recorded_graphs, "load_model", counting)
    runner, recording = graphed(config, max_tokens=24)
    plain = counting(config)
    decodes = [last_chunk_of(greedy_request(f"r{i}", 6 + i), list(range(4 * i, 4 * i + 4))) for i in range(3)]
    prompt = Chunk(greedy_request("p", 9), 0, 9, list(range(20, 29)), [20, 21, 22], samples=True)
    for plan in (StepPlan(tuple(decodes)), StepPlan((decodes[0], prompt))):
        for _ in range(2):
            assert runner.run(plan).token_ids == plain.run(plan).token_ids
    assert recording.num_replayed > 2
    assert runner.expert_load is not None and plain.expert_load is not None
    assert torch.equal(runner.expert_load.counts, plain.expert_load.counts)
    assert runner.expert_load.counts[0].sum() == 2 * (3 + 10) * PER_TOKEN["mixtral"]
