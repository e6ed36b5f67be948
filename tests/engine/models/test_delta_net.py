"""Gated delta nets: prompts and decodes compute the same, in bfloat16 too; what such models lack is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading.kv_memory import slots_for
from engine.models.delta_net import advance, advance_by_many
from engine.sampling_params import SamplingParams
from engine.scheduling.plan import StepPlan
from tests.engine.support.oracle import oracle_greedy, oracle_logits, random_ids, save_tiny
from tests.engine.support.steps_by_hand import RequestByHand, load_runner
from tests.engine.support.whole_engines import engine_for, run_prompts, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = random_ids(3, 150)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3_next", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 150])
def test_many_tokens_at_once_are_as_one_after_the_other(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    heads, key_dim, value_dim = 3, 8, 5
    query, key = (torch.randn(heads, num_tokens, key_dim, generator=generator) for _ in range(2))
    value = torch.randn(heads, num_tokens, value_dim, generator=generator)
    key = torch.nn.functional.normalize(key, dim=-1)
    decay = -torch.rand(heads, num_tokens, generator=generator)
    strength = torch.rand(heads, num_tokens, generator=generator)
    state = torch.randn(heads, key_dim, value_dim, generator=generator)
    outputs, after = advance_by_many(state, query, key, value, decay, strength)
    one = state.clone()[None]
    for token in range(num_tokens):
        row = (part[None, :, token] for part in (query, key, value, decay, strength))
        torch.testing.assert_close(advance(one, *row)[0], outputs[:, token], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(one[0], after, atol=1e-4, rtol=1e-4)


def test_bfloat16_is_as_near_as_that_of_transformers(model: Path) -> None:
    """Logits of about 4 differ from those in float32 by at most 0.2, or twice what transformers' own do."""
    wide, narrow = oracle_logits(model, LONG)[-1], oracle_logits(model, LONG, torch.bfloat16)[-1]
    row = RequestByHand(LONG, range(20))
    got = load_runner(model, dtype="bfloat16").logits(StepPlan((row.chunk(),)))[0]
    assert float((got - wide).abs().max()) <= max(0.2, 2 * float((narrow - wide).abs().max()))


def test_greedy_tokens_of_long_prompts_with_large_pages(model: Path) -> None:
    engine = engine_for(model, 64, 1024, max_step_tokens=50, max_running=3, state_snapshots=3)
    prompts = [LONG, [*LONG[:100], *random_ids(5, 30)], LONG[:130]]
    expected = [oracle_greedy(model, prompt, GREEDY.max_tokens) for prompt in prompts]
    for _ in range(2):
        assert [tokens_of(events) for events in run_prompts(engine, prompts, GREEDY)] == expected
    assert engine.cache.stats.hit_tokens > 0


def test_shared_prefixes_are_computed_to_their_end(model: Path) -> None:
    engine = engine_for(model, 16, 1024, max_running=2)
    engine.share_prefixes([LONG[:100]])
    request = engine.new_request("r", LONG, GREEDY, salt="tenant")
    engine.loop.submit(request)
    while engine.loop.has_work:
        engine.loop.step()
    assert request.num_cached == 96
    assert request.output_ids[:11] == oracle_greedy(model, LONG, GREEDY.max_tokens)[:11]


def test_kv_outside_of_the_engines_memory_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="host_kv_gib keeps KV outside"):
        Engine.from_config(EngineConfig(model=str(model), device="cpu", kv_pages=8, host_kv_gib=0.1))


def test_slots_take_at_most_half_of_the_memory_unless_the_settings_say_so() -> None:
    config = EngineConfig(max_running=4, kv_memory_share=0.5)
    assert slots_for(config, None, 100) == 8
    assert slots_for(config, 10**6, 100) == 8
    assert slots_for(config, 2400, 100) == 6, "600 of 1200 bytes"
    with pytest.raises(ValueError, match="lower max_running"):
        slots_for(config, 1000, 100)
    assert slots_for(EngineConfig(max_running=4, prefix_cache=False), 10**6, 100) == 4
    assert slots_for(EngineConfig(max_running=4, state_snapshots=9), 10**6, 100) == 13
