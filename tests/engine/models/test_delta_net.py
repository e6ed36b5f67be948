"""Gated delta nets: prompts and decodes compute the same, in bfloat16 too; what such models lack is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.loading.kv_memory import slots_for
from engine.models.torch_delta_net import advance, advance_by_many
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
from engine.settings.kv_tier import KVTier
from engine.values.plan import StepPlan
from engine.values.sampling_params import SamplingParams
from tests.engine.support.oracle import oracle_greedy, oracle_logits, random_ids, save_tiny
from tests.engine.support.steps_by_hand import RequestByHand, load_runner
from tests.engine.support.whole_engines import engine_for, run_prompts, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = random_ids(3, 150)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3_next", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 150])
def test_many_tokens_together_give_the_same_as_in_turn(num_tokens: int) -> None:
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


@pytest.mark.parametrize("speculation", [None, Speculation(method="ngram", adaptive=False)])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_greedy_tokens_under_preemption(model: Path, preemption: str, speculation: Speculation | None) -> None:
    """Memory holds about two of six requests; their states go to host memory with their pages, or they compute
    again.
    """
    host = {"preemption": preemption, "host_kv_gib": 2**-5, "state_snapshots": 0, "speculation": speculation}
    engine = engine_for(model, 4, 112, max_step_tokens=24, max_running=6, **host)
    params, prompts = SamplingParams(temperature=0, max_tokens=20), [random_ids(20 + i, 25 + i) for i in range(6)]
    streams = run_prompts(engine, prompts, params)
    for events, prompt in zip(streams, prompts, strict=True):
        assert tokens_of(events) == oracle_greedy(model, prompt, 20)
    load = engine.loop.load()
    assert load.num_preemptions > 0
    assert (load.num_swapped > 0, load.cache.recompute_host_tokens > 0) == (preemption == "swap",) * 2


@pytest.mark.parametrize("page_size", [1, 16])
def test_prompts_continue_from_states_in_host_memory(model: Path, page_size: int) -> None:
    """Pages for one of three prompts, and one slot beside a running request's: each evicts what came before it.
    Whether a turn of a conversation goes on from inside a page, too.
    """
    host = {"host_kv_gib": 2**-5, "host_kv_min_uses": 1, "state_snapshots": 1}
    engine = engine_for(model, page_size, 192, max_step_tokens=64, max_running=1, **host)
    turn = [*LONG[:70], *oracle_greedy(model, LONG[:70], GREEDY.max_tokens), 7, 8]
    for prompt, num_cached in ((LONG[:70], 0), (LONG[50:], 0), (turn, 81), (LONG[40:], 0), (turn, 81)):
        (events,) = run_prompts(engine, [prompt], GREEDY)
        assert tokens_of(events) == oracle_greedy(model, prompt, GREEDY.max_tokens)
        assert events[-1].num_cached == num_cached
    assert engine.loop.load().cache.host_hit_tokens > 0


def test_a_stream_that_another_engine_began_continues_with_the_same_tokens(model: Path) -> None:
    first, second = (engine_for(model, 16, 512, max_running=2) for _ in range(2))
    (events,) = run_prompts(first, [LONG], GREEDY)
    tokens = tokens_of(events)
    request = second.new_request("r", LONG, GREEDY, output_ids=tokens[:5])
    second.loop.submit(request)
    while second.loop.has_work:
        second.loop.step()
    assert request.output_ids == tokens == oracle_greedy(model, LONG, GREEDY.max_tokens)


def test_files_are_refused_with_the_setting_to_use_instead(model: Path, tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(model), device="cpu", kv_pages=8, host_kv_gib=0.1, kv_tier=KVTier(str(tmp_path))
    )
    with pytest.raises(ValueError, match=r"kv_tier keeps KV in files, .*larger host_kv_gib"):
        Engine.from_config(config)


def test_host_memory_for_less_than_a_state_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match=r"host_kv_gib is 1e-05, but a page with a recurrent state takes 0\.0"):
        Engine.from_config(EngineConfig(model=str(model), device="cpu", kv_pages=8, host_kv_gib=1e-5))


def test_slots_take_at_most_half_of_the_memory_unless_the_settings_say_so() -> None:
    config = EngineConfig(max_running=4, kv_memory_share=0.5)
    assert slots_for(config, None, 100) == 8
    assert slots_for(config, 10**6, 100) == 8
    assert slots_for(config, 2400, 100) == 6, "600 of 1200 bytes"
    with pytest.raises(ValueError, match="lower max_running"):
        slots_for(config, 1000, 100)
    assert slots_for(EngineConfig(max_running=4, prefix_cache=False), 10**6, 100) == 4
    assert slots_for(EngineConfig(max_running=4, state_snapshots=9), 10**6, 100) == 13
