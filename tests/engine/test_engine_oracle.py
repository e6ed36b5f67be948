"""Whole engines against `transformers`: greedy tokens in mixed batches, cold and warm, preempted and aborted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.values.sampling_params import SamplingParams
from tests.engine.support.oracle import oracle_greedy, random_ids, save_tiny
from tests.engine.support.whole_engines import GREEDY, engine_for, run_prompts, tokens_of

FAMILIES = [
    "llama2",
    "llama3.1",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_tied",
    "mqa",
    "mixtral",
    "qwen3_moe_mixed",
    "deepseek_v3",
]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_greedy_tokens_cold_and_warm(model: Path, page_size: int) -> None:
    """Prompts that share prefixes of odd lengths, then the same again: identical tokens, found in the cache."""
    engine = engine_for(model, page_size, 4096, max_step_tokens=32, max_running=16)
    base = random_ids(6, 50)
    prompts = [base, base[:33], [*base[:21], *random_ids(7, 12)], random_ids(8, 3), random_ids(9, 70)]
    expected = [oracle_greedy(model, prompt, GREEDY.max_tokens) for prompt in prompts]
    cold, warm = run_prompts(engine, prompts), run_prompts(engine, prompts)
    assert [tokens_of(events) for events in cold] == expected
    assert [tokens_of(events) for events in warm] == expected
    assert [events[-1].num_cached for events in warm] == [len(prompt) - 1 for prompt in prompts]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_tokens_under_preemption_and_aborts(model: Path, page_size: int, preemption: Any) -> None:
    """Memory holds about two of six requests, and one of them is aborted on the way."""
    host = {"preemption": preemption, "host_kv_gib": 2**-10}  # 1 MiB
    engine = engine_for(model, page_size, 112, max_step_tokens=24, max_running=6, **host)
    params = SamplingParams(temperature=0, max_tokens=20)
    prompts = [random_ids(20 + i, 25 + i) for i in range(6)]
    streams = run_prompts(engine, prompts, params, abort=2)
    assert streams[2][-1].finish_reason in ("abort", "length")
    for index in (0, 1, 3, 4, 5):
        assert tokens_of(streams[index]) == oracle_greedy(model, prompts[index], 20)
    load = engine.loop.load()
    assert load.num_preemptions > 0
    assert (load.num_swapped > 0, load.cache.recompute_host_tokens > 0) == (preemption == "swap",) * 2


@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_tokens_of_prompts_whose_beginning_comes_back_from_host_memory(model: Path, page_size: int) -> None:
    """Prompts that share prefixes of odd lengths, in pages for one of them: each evicts what came before it."""
    host = {"host_kv_gib": 2**-8, "host_kv_min_uses": 1}
    engine = engine_for(model, page_size, 112, max_step_tokens=32, max_running=1, **host)
    base = random_ids(6, 50)
    prompts = [[*base, *random_ids(7, 31)], [*base[:33], *random_ids(8, 40)], random_ids(9, 90)]
    expected = [oracle_greedy(model, prompt, GREEDY.max_tokens) for prompt in prompts]
    for _ in range(3):
        for prompt, tokens in zip(prompts, expected, strict=True):
            (events,) = run_prompts(engine, [prompt])
            assert tokens_of(events) == tokens
    assert events[-1].num_cached == 89 - 89 % page_size
    assert engine.loop.load().cache.host_hit_tokens > 0


def test_sampled_tokens_are_the_same_in_a_batch_or_not_cold_and_warm(model: Path) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=12, seed=5)
    prompts = [random_ids(30 + i, 20) for i in range(4)]
    together = run_prompts(engine_for(model, 16, 1024), prompts, params)
    engine = engine_for(model, 16, 1024)
    for _ in range(2):
        assert tokens_of(run_prompts(engine, prompts[:1], params)[0]) == tokens_of(together[0])
