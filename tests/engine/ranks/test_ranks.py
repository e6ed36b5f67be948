"""A model on several ranks, in one stage or several, gives the tokens that it gives on one, whatever its family
and whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from engine.settings.drafting import Speculation
from engine.values.beam_search import BeamParams
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.engine.support.engines_on_ranks import PROMPTS, Layout, run_on_ranks, tokens_of_each
from tests.engine.support.oracle import FAMILIES, Tiny, random_ids, tiny_models


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    def shape(family: str) -> dict[str, int]:
        heads = {"llama2": 8, "mqa": 1}.get(family, 2)
        if family in ("qwen3_next", "qwen3_5"):  # They have keys and values in each fourth layer.
            return {"num_hidden_layers": 8}
        return {"num_attention_heads": 8, "num_key_value_heads": heads, "num_hidden_layers": 3}

    return tiny_models(tmp_path_factory, shape)


@pytest.fixture(scope="module")
def on_one_rank(tiny: Tiny) -> Callable[[str], list[list[int]]]:
    """The greedy tokens of a family's model on one rank."""
    return cache(lambda family: tokens_of_each(run_on_ranks(tiny(family), 1, PROMPTS)[0]))


ONE_STAGE, STAGES, BOTH = Layout(2), Layout(1, stages=2), Layout(2, stages=2)
PARTS = Layout(4, parts=2)
"""Each two of four ranks have the same one of two key-value heads, and divide its KV."""


@pytest.mark.parametrize("layout", [Layout(4), STAGES, Layout(1, stages=3), BOTH], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same_greedy_tokens(
    tiny: Tiny, on_one_rank: Callable[[str], list[list[int]]], family: str, layout: Layout
) -> None:
    """Each of four ranks holds one of two key-value heads, or the only one, as others do."""
    shared, _ = run_on_ranks(tiny(family), layout, PROMPTS)
    assert tokens_of_each(shared) == on_one_rank(family)


@pytest.mark.parametrize("layout", [ONE_STAGE, STAGES, BOTH, PARTS], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_sampled_tokens_and_their_logprobs_are_the_same(tiny: Tiny, overlap: bool, layout: Layout) -> None:
    """Tokens are drawn with noise, under penalties; the next step begins with tokens that only rank 0 chose."""
    params = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, max_tokens=12, seed=3, logprobs=2)
    alone, _ = run_on_ranks(tiny("qwen3"), 1, PROMPTS, params, overlap=overlap)
    shared, _ = run_on_ranks(tiny("qwen3"), layout, PROMPTS, params, overlap=overlap)
    assert tokens_of_each(shared) == tokens_of_each(alone)
    for ours, theirs in zip(shared, alone, strict=True):
        scores = [
            [found.logprob for event in events for found in event.logprobs or ()] for events in (ours, theirs)
        ]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
        assert len(scores[0]) == 12


@pytest.mark.parametrize("layout", [ONE_STAGE, STAGES, BOTH], ids=str)
@pytest.mark.parametrize(
    ("name", "preemption"),
    [("mistral", "recompute"), ("mistral", "swap"), ("qwen3_next", "swap"), ("qwen3_5", "recompute")],
)
def test_preempted_requests_continue_with_the_same_tokens(
    tiny: Tiny, name: str, preemption: Any, layout: Layout
) -> None:
    """Memory holds about two of five requests: every rank swaps its own pages and states out and in, or recomputes
    them.
    """
    prompts = [random_ids(20 + index, 25 + index) for index in range(5)]
    params = SamplingParams(temperature=0, max_tokens=14)
    memory = {"kv_pages": 12, "page_size": 8, "preemption": preemption, "host_kv_gib": 2**-6, "max_running": 6}
    alone, _ = run_on_ranks(tiny(name), 1, prompts, params)
    shared, engine = run_on_ranks(tiny(name), layout, prompts, params, **memory)
    assert tokens_of_each(shared) == tokens_of_each(alone)
    load = engine.loop.load()
    assert load.num_preemptions > 0
    assert (load.num_swapped > 0) == (preemption == "swap")


@pytest.mark.parametrize("layout", [Layout(4), Layout(1, stages=3), BOTH, PARTS], ids=str)
def test_pages_that_end_a_shared_prefix_are_copied_on_every_rank(tiny: Tiny, layout: Layout) -> None:
    base = random_ids(6, 50)
    prompts = [base, [*base[:21], *random_ids(7, 12)], base[:33]]
    alone, _ = run_on_ranks(tiny("llama3.1"), 1, prompts, max_running=1)
    shared, _ = run_on_ranks(tiny("llama3.1"), layout, prompts, max_running=1)
    assert tokens_of_each(shared) == tokens_of_each(alone)
    assert [events[-1].num_cached for events in shared] == [0, 21, 32]


@pytest.mark.parametrize("layout", [ONE_STAGE, STAGES, BOTH, PARTS], ids=str)
def test_prompts_are_scored_alike(tiny: Tiny, layout: Layout) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=3)
    alone, _ = run_on_ranks(tiny("qwen2"), 1, PROMPTS, params)
    shared, _ = run_on_ranks(tiny("qwen2"), layout, PROMPTS, params)
    for prompt, ours, theirs in zip(PROMPTS, shared, alone, strict=True):
        (got, expected) = (scores_of(prompt, ours), scores_of(prompt, theirs))
        assert len(got) == len(prompt) - 1
        assert got == pytest.approx(expected, abs=1e-4)


def scores_of(prompt: list[int], events: Sequence[StreamDelta]) -> list[float]:
    parts = [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
    return [score.logprob for part in parts for score in part.read(prompt[part.start : part.end])]


@pytest.mark.parametrize("layout", [ONE_STAGE, STAGES, BOTH, PARTS], ids=str)
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_draft_tokens_are_verified_by_all_ranks(tiny: Tiny, method: Any, layout: Layout) -> None:
    """The draft model is rank 0's alone."""
    model = tiny("llama_tied")
    speculation = Speculation(method=method, model=str(model) if method == "draft_model" else None, adaptive=False)
    repeated = [random_ids(1, 7) * 5, random_ids(2, 30)]
    params = SamplingParams(temperature=0, max_tokens=20)
    alone, _ = run_on_ranks(model, 1, repeated, params)
    shared, engine = run_on_ranks(model, layout, repeated, params, speculation=speculation)
    assert tokens_of_each(shared) == tokens_of_each(alone)
    if method == "draft_model":  # the same model: its draft tokens are right
        assert engine.loop.load().num_steps < 20 * min(layout.stages, len(repeated))


@pytest.mark.parametrize("layout", [ONE_STAGE, STAGES, BOTH, PARTS], ids=str)
def test_kv_in_eight_bits_is_scaled_by_all_ranks_together(tiny: Tiny, layout: Layout) -> None:
    """Finding the scales is a step that all of them run."""
    shared, _ = run_on_ranks(tiny("qwen3"), layout, PROMPTS, kv_dtype="fp8")
    assert [events[-1].finish_reason for events in shared] == ["length"] * len(PROMPTS)
    if layout in (STAGES, PARTS):  # Each layer has the scales that it has on as many ranks with whole KV.
        alone, _ = run_on_ranks(tiny("qwen3"), layout.size, PROMPTS, kv_dtype="fp8")
        assert tokens_of_each(shared) == tokens_of_each(alone)


@pytest.mark.parametrize("layout", [STAGES, BOTH], ids=str)
def test_the_beams_of_a_search_are_the_same(tiny: Tiny, layout: Layout) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, beams=BeamParams(3, 1))
    alone, _ = run_on_ranks(tiny("llama2"), 1, PROMPTS, params)
    shared, _ = run_on_ranks(tiny("llama2"), layout, PROMPTS, params)
    assert tokens_of_each(shared) == tokens_of_each(alone)


@pytest.mark.parametrize("layout", [STAGES, BOTH], ids=str)
def test_layers_with_a_window_have_pages_of_their_own_on_every_stage(tiny: Tiny, layout: Layout) -> None:
    """The pages of a window that has passed are reused, on all stages at once."""
    prompts = [random_ids(seed, 100) for seed in range(6)]
    settings: dict[str, Any] = {"windowed_kv": "on", "page_size": 4, "kv_pages": 120, "max_running": 6}
    alone, _ = run_on_ranks(tiny("qwen2_sliding"), 1, prompts)
    shared, engine = run_on_ranks(tiny("qwen2_sliding"), layout, prompts, **settings)
    assert engine.runner.layer_groups is not None
    assert tokens_of_each(shared) == tokens_of_each(alone)


def test_pages_are_as_many_as_the_poorest_rank_has(tiny: Tiny) -> None:
    """A rank's pages hold its heads only: a quarter of the model's heads takes a quarter of the memory."""
    _, engine = run_on_ranks(tiny("llama2"), 4, PROMPTS[:1], kv_pages=None, kv_memory_share=1e-4, max_running=4)
    runner: Any = engine.runner
    whole = 3 * 2 * 8 * 32 * 4
    assert runner.kv_bytes_per_token * 4 == whole
    assert runner.num_pages == engine.cache.num_pages > 0
