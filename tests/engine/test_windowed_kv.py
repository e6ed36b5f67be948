"""Whole engines whose layers with a window have pages of their own: prefixes, drafts, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.settings.drafting import Speculation
from engine.settings.kv_tier import KVTier
from engine.values.sampling_params import SamplingParams
from tests.engine.support.oracle import oracle_greedy, random_ids, save_tiny
from tests.engine.support.whole_engines import engine_for, run_prompts, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = random_ids(3, 90)


@pytest.fixture(scope="module", params=["gemma3", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_prompts_far_longer_than_the_window_cold_warm_and_speculated(model: Path, attention: str) -> None:
    """Windows have 9 tokens, the prompt 90, which is computed in chunks of 16; then it comes with another end."""
    engine = engine_for(
        model,
        8,
        480,
        max_step_tokens=16,
        max_running=4,
        attention=attention,
        windowed_kv="on",
        speculation=Speculation(method="ngram", adaptive=False),
    )
    other = [*PROMPT[:60], *random_ids(5, 12)]
    for prompt in (PROMPT, PROMPT, other, [*other[:65], *random_ids(8, 9)]):
        [events] = run_prompts(engine, [prompt], GREEDY)
        assert tokens_of(events) == oracle_greedy(model, prompt, GREEDY.max_tokens)
    assert engine.cache.stats.hit_tokens == 88 + 0 + 64


def test_the_same_memory_holds_more_requests(model: Path) -> None:
    """Six requests of 90 tokens and more, in memory for two if all layers keep everything."""
    most, prompts = {}, [random_ids(seed, 90) for seed in range(6)]
    for setting in ("off", "on"):
        engine = engine_for(model, 8, 208, max_step_tokens=16, max_running=6, windowed_kv=setting)
        for number, prompt in enumerate(prompts):
            engine.loop.submit(engine.new_request(str(number), prompt, GREEDY))
        most[setting] = 0
        while engine.loop.has_work:
            engine.loop.step()
            most[setting] = max(most[setting], len(engine.scheduler.allocator.running))
    assert most["off"] == 2 and most["on"] > 2


def test_a_setting_that_does_not_work_with_windows_is_named_at_the_start(model: Path, tmp_path: Path) -> None:
    assert engine_for(model, 8, 480, host_kv_gib=0.01).runner.layer_groups is None
    with pytest.raises(ValueError, match=r'windowed_kv is "on", but kv_tier'):
        engine_for(model, 8, 480, host_kv_gib=0.01, kv_tier=KVTier(str(tmp_path)), windowed_kv="on")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_greedy_tokens_under_preemption(model: Path, preemption: str) -> None:
    """Memory for about two of four requests, whose windows go to host memory and back with all other KV."""
    host = {"preemption": preemption, "host_kv_gib": 2**-8, "windowed_kv": "on"}
    engine = engine_for(model, 4, 96, max_step_tokens=16, max_running=4, **host)
    params, prompts = SamplingParams(temperature=0, max_tokens=50), [random_ids(20 + i, 10 + i) for i in range(4)]
    streams = run_prompts(engine, prompts, params)
    for events, prompt in zip(streams, prompts, strict=True):
        assert tokens_of(events) == oracle_greedy(model, prompt, 50)
    load = engine.loop.load()
    assert load.num_preemptions > 0
    assert (load.num_swapped > 0, load.cache.recompute_host_tokens > 0) == (preemption == "swap",) * 2


def test_prefixes_come_back_from_host_memory_with_their_windows(model: Path) -> None:
    """Pages for one prompt: each evicts what came before it."""
    host = {"host_kv_gib": 2**-7, "host_kv_min_uses": 1, "windowed_kv": "on"}
    engine = engine_for(model, 8, 104, max_step_tokens=16, max_running=1, **host)
    prompts = [PROMPT, random_ids(9, 90), random_ids(7, 90), [*PROMPT[:88], *random_ids(8, 9)]]
    for prompt in prompts:
        [events] = run_prompts(engine, [prompt], GREEDY)
        assert tokens_of(events) == oracle_greedy(model, prompt, GREEDY.max_tokens)
    assert events[-1].num_cached == 88 and engine.loop.load().cache.host_hit_tokens > 0


def test_a_draft_model_with_windows_keeps_all_of_its_kv_as_its_model_does(model: Path) -> None:
    speculation = Speculation(method="draft_model", model=str(model), adaptive=False)
    engine = engine_for(model, 8, 480, max_step_tokens=16, max_running=4, speculation=speculation)
    [events] = run_prompts(engine, [PROMPT], GREEDY)
    assert tokens_of(events) == oracle_greedy(model, PROMPT, GREEDY.max_tokens)
    assert engine.runner.layer_groups is None
