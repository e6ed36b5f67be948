"""The runner against transformers: every family, page sizes, mixed batches, shared and copied pages."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from cache import PageCopy
from engine.loading import load_model
from engine.loading.step_memory import worst_step
from engine.loading.weights import load_decoder
from engine.parallel.collective import ALONE
from engine.runner.model_runner import ModelRunner
from engine.runner.stage_clock import StageClock
from engine.runner.token_reader import TokensUnderway
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
from engine.values.plan import StepPlan, StepResult
from tests.engine.support.oracle import FAMILIES, VOCAB, Tiny, oracle_greedy, oracle_logits, tiny_models
from tests.engine.support.steps_by_hand import RequestByHand, load_runner, pages_of, random_prompt, run_step

PAGE_SIZES = (1, 16, 64)
MIXED = ("llama2", "llama3.1", "mistral", "qwen2", "qwen2_sliding", "qwen3", "mqa", "mixtral", "qwen3_moe_mixed")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_models(tmp_path_factory, lambda family: {})


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tiny: Tiny, family: str) -> None:
    """A prompt is computed in two chunks, then token by token: logits at every border are within 1e-4."""
    tokens = random_prompt(90, seed=1)
    expected = oracle_logits(tiny(family), tokens)
    runner = load_runner(tiny(family))
    pages = range(5, 12)
    borders = [0, 40, 80, *range(81, 91)]
    for start, end in pairwise(borders):
        row = RequestByHand(tokens[:end], pages, computed=start)
        got = runner.logits(StepPlan((row.chunk(),)))
        assert (got[0] - expected[end - 1]).abs().max() < 1e-4, f"after token {end}"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("family", MIXED)
def test_greedy_tokens_in_mixed_batches(tiny: Tiny, family: str, page_size: int) -> None:
    """Requests join while others decode, prompts come in chunks: all tokens are the oracle's."""
    model = tiny(family)
    runner = load_runner(model, page_size)
    prompts = [random_prompt(length, seed) for seed, length in enumerate((3, 70, 25, 1))]
    rows = [RequestByHand(p, pages_of(page_size, 128 * i, 120)) for i, p in enumerate(prompts)]
    a, b, c, d = rows
    run_step(runner, [(a, None)])
    run_step(runner, [(a, None), (b, 30)])  # a decodes, b begins
    run_step(runner, [(a, None), (b, 17), (c, None)])
    run_step(runner, [(a, None), (c, None), (b, 22)])
    run_step(runner, [(c, None), (a, None), (b, 1), (d, None)])  # b's last prompt token is a row of one
    for _ in range(12):
        run_step(runner, [(row, None) for row in rows])
    for row, p in zip(rows, prompts, strict=True):
        assert row.request.output_ids == oracle_greedy(model, p, row.request.num_output)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_a_prefix_found_in_pages_gives_the_same_tokens(tiny: Tiny, family: str, page_size: int) -> None:
    """Warm requests share whole pages and copy the one in which the prefix ends; cold ones compute all."""
    model = tiny(family)
    runner = load_runner(model, page_size)
    shared = random_prompt(75, seed=5)
    prompts = [shared + random_prompt(9, seed=6), shared + random_prompt(20, seed=7)]
    cold = RequestByHand(prompts[0], pages_of(page_size, 0, 120))
    for _ in range(10):
        run_step(runner, [(cold, None)])
    whole = len(shared) // page_size
    own = pages_of(page_size, 256, 120 - whole * page_size)
    warm = RequestByHand(prompts[1], [*cold.pages[:whole], *own], computed=len(shared))
    inside = len(shared) % page_size
    copies = [PageCopy(cold.pages[whole], own[0], inside)] if inside else []
    run_step(runner, [(cold, None), (warm, None)], copies)
    for _ in range(10):
        run_step(runner, [(warm, None), (cold, None)])
    assert cold.request.output_ids == oracle_greedy(model, prompts[0], cold.request.num_output)
    assert warm.request.output_ids == oracle_greedy(model, prompts[1], warm.request.num_output)


def test_copies_read_all_sources_before_writing_any_target(tiny: Tiny) -> None:
    """One page may be the target of one copy and the source of another."""
    runner = load_runner(tiny("llama2"), page_size=4, kv_tokens=16)
    data = runner.pages.data
    data.copy_(torch.arange(5).view(1, 1, 5, 1, 1, 1).expand_as(data))
    runner.run(StepPlan(copies=(PageCopy(0, 1, 4), PageCopy(1, 2, 4), PageCopy(3, 0, 2))))
    assert data[:, :, :, 0, 0, 0].tolist() == [[[3.0, 0.0, 1.0, 3.0, 4.0]] * 2] * 3


def test_the_former_contents_of_a_page_do_not_matter(tiny: Tiny) -> None:
    """NaN left behind by a former owner reaches no attention: not from padding, not from a page's unused rest."""
    model = tiny("llama3.1")
    runner = load_runner(model)
    runner.pages.data[:, :, : runner.num_pages] = torch.nan
    prompts = [random_prompt(5, seed=1), random_prompt(50, seed=2), random_prompt(33, seed=3)]
    rows = [RequestByHand(p, pages_of(16, 128 * i, 70)) for i, p in enumerate(prompts)]
    for _ in range(6):
        run_step(runner, [(row, None) for row in rows])
    for row, p in zip(rows, prompts, strict=True):
        assert row.request.output_ids == oracle_greedy(model, p, 6)


def test_only_a_row_without_valid_logits_fails(tiny: Tiny) -> None:
    """A request whose KV is broken gets -1; its neighbour in the batch does not notice."""
    model = tiny("qwen3")
    runner = load_runner(model)
    tokens = random_prompt(20, seed=1)
    healthy, broken = RequestByHand(tokens, [0, 1, 2]), RequestByHand(tokens, [3, 4, 5])
    run_step(runner, [(healthy, None), (broken, None)])
    runner.pages.data[:, :, 3] = torch.nan
    run_step(runner, [(healthy, None), (broken, None)])
    assert broken.request.output_ids[-1] == -1
    assert healthy.request.output_ids == oracle_greedy(model, tokens, 2)


def test_chunks_that_do_not_reach_the_end_are_not_sampled(tiny: Tiny) -> None:
    runner = load_runner(tiny("llama2"))
    row = RequestByHand(random_prompt(20, seed=1), [0, 1])
    result = runner.run(StepPlan((row.chunk(10),)))
    assert len(result.token_ids) == len(result.logprobs) == 0
    assert runner.run(StepPlan()).token_ids == ()


def test_settings_reach_the_runner(tiny: Tiny) -> None:
    runner = load_runner(tiny("qwen3"), page_size=8, max_model_len=100, dtype="bfloat16", attention="reference")
    assert (runner.page_size, runner.num_pages, runner.max_model_len) == (8, 128, 100)
    assert (runner.kv_dtype, runner.attention_name) == (torch.bfloat16, "reference")
    row = RequestByHand(random_prompt(20, seed=1), [0, 1, 2, 3])
    run_step(runner, [(row, None)])
    run_step(runner, [(row, None)])
    assert all(0 <= token < VOCAB for token in row.request.output_ids)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_model_len": 513}, "512 tokens"),
        ({"attention": "magic"}, "reference"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(tiny: Tiny, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_runner(tiny("llama2"), **settings)


def test_the_worst_step_runs(tiny: Tiny) -> None:
    """The plan with which GPU memory is measured must be one that any runner can run."""
    runner = load_runner(tiny("llama2"))
    config = EngineConfig(max_running=5, max_step_tokens=40)
    plan = worst_step(config, runner.max_model_len)
    assert plan.num_tokens == 40
    assert len(runner.run(plan).token_ids) == 5


def test_the_step_by_which_a_recurrent_model_measures_memory_keeps_its_draft_tokens(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its rows drafts as many tokens as one may. Only the device is that of a GPU."""
    config = EngineConfig(
        str(tiny("qwen3_next")),
        device="cpu",
        attention="reference",
        max_running=4,
        max_step_tokens=40,
        speculation=Speculation(max_drafts=3),
    )
    loading = load_model._Loading(config, 0, ALONE)
    small = loading.with_a_page(load_decoder)
    ran: list[StepResult] = []

    def measure(config: EngineConfig, limit: int, with_pages: Callable[[int], ModelRunner], _: object) -> int:
        plan = worst_step(config, limit)
        assert [chunk.num_drafts for chunk in plan.chunks] == [3, 3, 3, 0] and plan.num_tokens == 40
        ran.append(with_pages(-(-limit // config.page_size)).run(plan))
        return 2**30

    monkeypatch.setattr(load_model, "measure_step", measure)
    monkeypatch.setattr(loading, "_device", torch.device("cuda"))
    loading.with_all_pages(small)
    assert len(ran) == 1


def test_a_step_reports_the_time_of_its_preparation_and_sampling(tiny: Tiny) -> None:
    runner = load_runner(tiny("mistral"))
    sequence = RequestByHand(random_prompt(9, 1), [0])
    result = runner.run(StepPlan((sequence.chunk(4),)))
    assert result.prepare_seconds > 0 == result.sample_seconds, "the chunk ends before its last token"
    sequence.computed = 4
    result = runner.run(StepPlan((sequence.chunk(),)))
    assert result.prepare_seconds > 0 and result.sample_seconds > 0


def test_a_step_that_samples_nothing_has_ended_on_its_device(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is over, other threads read and write its pages. Its reading of no tokens follows its work."""
    waits: list[str] = []
    wait = TokensUnderway.wait

    def noted(tokens: TokensUnderway) -> list[int]:
        waits.append("tokens")
        return wait(tokens)

    monkeypatch.setattr(TokensUnderway, "wait", noted)
    monkeypatch.setattr(StageClock, "wait", lambda _: waits.append("all"))
    runner = load_runner(tiny("qwen3"))
    row = RequestByHand(random_prompt(60, seed=1), range(4))
    run_step(runner, [(row, 40)])
    assert waits == ["tokens"]
    runner.run(StepPlan())
    assert waits == ["tokens", "all"]
    run_step(runner, [(row, None)])
    assert waits == ["tokens", "all", "tokens"], "who reads the tokens waits"
