"""Engines' prompt scores compared with `transformers`: in chunks of any size, cold, warm, preempted, resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine import LLM
from engine.loading.step_memory import worst_step
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
from engine.values.logprobs import PackedLogprobs, TokenLogprobs, joined
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.engine.support.oracle import VOCAB, oracle_greedy, oracle_logits, random_ids, save_tiny

TOP = 4
SCORED = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=TOP, logprobs=1)
PLAIN = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module", params=["llama3.1", "mistral", "qwen3_tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp("model"))


def engine_for(model: Path, **settings: Any) -> Engine:
    config = {"device": "cpu", "page_size": 8, "kv_pages": 128, "max_running": 8, "max_step_ms": None, **settings}
    return Engine.from_config(EngineConfig(model=str(model), **config))


def run(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams] | SamplingParams = SCORED
) -> list[list[StreamDelta]]:
    """Run all prompts at once, to the end."""
    events: list[list[StreamDelta]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        sampling = params if isinstance(params, SamplingParams) else params[index]
        engine.loop.submit(engine.new_request(str(index), prompt, sampling))
    while engine.loop.has_work:
        for event in engine.loop.step():
            events[int(event.request_id)].append(event)
        assert sum(engine.cache.account()) == engine.cache.num_pages
    return events


def scores_of(events: Sequence[StreamDelta], prompt: Sequence[int]) -> list[TokenLogprobs]:
    """Return a prompt's scores, checking that they came in order, once, and before the first token."""
    whole: PackedLogprobs | None = None
    for event in events:
        if event.prompt_logprobs is not None:
            assert not any(before.token_ids for before in events[: events.index(event)])
            whole = joined(whole, event.prompt_logprobs)
    assert whole is not None and (whole.start, whole.end) == (1, len(prompt))
    return whole.read(prompt[1:])


def check(model: Path, prompt: list[int], scores: Sequence[TokenLogprobs], top: int = TOP) -> None:
    """Check that log-probabilities, ranks and alternatives are those of transformers."""
    expected = torch.log_softmax(oracle_logits(model, prompt), dim=-1)[:-1]
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert [at.token_id for at in scores] == prompt[1:]
    assert [at.logprob for at in scores] == pytest.approx(own.tolist(), abs=1e-4)
    for at, row in zip(scores, expected, strict=True):
        assert [logprob for _, logprob in at.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)
        assert dict(at.top) == pytest.approx({token: row[token].item() for token, _ in at.top}, abs=1e-4)
        # Tokens that differ only by rounding may change places.
        assert int((row > at.logprob + 1e-4).sum()) < at.rank <= 1 + int((row > at.logprob - 1e-4).sum())


@pytest.mark.parametrize(("chunk", "overlap"), [(8, False), (13, True), (64, False), (512, True)])
def test_scores_in_chunks_of_any_size_and_mixed_batches(model: Path, chunk: int, overlap: bool) -> None:
    engine = engine_for(model, max_step_tokens=chunk, overlap=overlap)
    prompts = [random_ids(1, 70), random_ids(2, 9), random_ids(3, 2), random_ids(4, 33), random_ids(5, 1)]
    plain = [random_ids(6, 20), random_ids(7, 40)]
    params = [SCORED] * len(prompts) + [PLAIN] * len(plain)
    streams = run(engine, [*prompts, *plain], params)
    for prompt, events in zip([*prompts, *plain], streams, strict=True):
        tokens = [token for event in events for token in event.token_ids]
        assert tokens == oracle_greedy(model, prompt, 6)
    for prompt, events in zip(prompts[:4], streams, strict=False):
        check(model, prompt, scores_of(events, prompt))
    assert all(event.prompt_logprobs is None for events in streams[4:] for event in events)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_warm_cache_hides_no_scores_and_gains_the_computed_pages(model: Path, overlap: bool) -> None:
    engine = engine_for(model, max_step_tokens=24, overlap=overlap)
    prompt = random_ids(10, 61)
    for _ in range(2):
        (events,) = run(engine, [prompt])
        check(model, prompt, scores_of(events, prompt))
        assert events[-1].num_cached == 0
    (events,) = run(engine, [prompt], PLAIN)
    assert events[-1].num_cached == len(prompt) - 1


def test_speculation_changes_no_score(model: Path) -> None:
    engine = engine_for(model, max_step_tokens=24, speculation=Speculation("ngram", adaptive=False, min_match=1))
    repeating = random_ids(15, 7) * 6
    params = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=TOP, logprobs=TOP)
    prompts = [repeating, random_ids(16, 50), repeating[3:]]
    streams = run(engine, prompts, params)
    for prompt, events in zip(prompts, streams, strict=True):
        check(model, prompt, scores_of(events, prompt))
    tokens = [token for event in streams[0] for token in event.token_ids]
    assert tokens == oracle_greedy(model, repeating, 12)
    # Generated tokens have the log-probabilities that they would have in a prompt.
    logprobs = [at for event in streams[0] for at in event.logprobs or ()]
    check(model, [*repeating, *tokens], [*scores_of(streams[0], repeating), *map(ranked_first, logprobs)])


def ranked_first(at: TokenLogprobs) -> TokenLogprobs:
    assert at.rank == 0 and at.top[0][0] == at.token_id
    return msgspec.structs.replace(at, rank=1)


def test_different_numbers_of_alternatives_in_one_step(model: Path) -> None:
    tops = [0, 3, 20]
    params = [SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=top) for top in tops]
    prompts = [random_ids(20 + top, 15 + top) for top in tops]
    for prompt, top, events in zip(prompts, tops, run(engine_for(model), prompts, params), strict=True):
        check(model, prompt, scores_of(events, prompt), top)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_neither_repeats_nor_loses_any(model: Path, overlap: bool, preemption: str) -> None:
    """There is room for about two of five, which preempt each other while their prompts are being scored."""
    memory = {"preemption": preemption, "host_kv_gib": 0.01}
    engine = engine_for(model, kv_pages=18, max_step_tokens=16, overlap=overlap, **memory)
    params = SamplingParams(temperature=0, max_tokens=40, prompt_logprobs=TOP)
    prompts = [random_ids(30 + i, 40 + i) for i in range(5)]
    for prompt, events in zip(prompts, run(engine, prompts, params), strict=True):
        check(model, prompt, scores_of(events, prompt))
        assert [t for event in events for t in event.token_ids] == oracle_greedy(model, prompt, 40)
    assert engine.loop.load().num_preemptions > 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_preempted_half_way_reports_the_rest(model: Path, overlap: bool, preemption: str) -> None:
    memory = {"preemption": preemption, "host_kv_gib": 0.01}
    engine = engine_for(model, kv_pages=12, max_step_tokens=8, overlap=overlap, **memory)
    prompts = [random_ids(45, 66), random_ids(46, 70)]
    requests = [engine.new_request(str(at), prompt, SCORED, priority=-at) for at, prompt in enumerate(prompts)]
    events: list[list[StreamDelta]] = [[], []]
    reported: set[int] = set()  # After it was preempted.
    engine.loop.submit(requests[0])
    for step in range(200):
        if step == 4:
            engine.loop.submit(requests[1])
        for event in engine.loop.step() if engine.loop.has_work else ():
            events[int(event.request_id)].append(event)
        if requests[0].num_preemptions:
            reported.add(requests[0].num_prompt_reported)
    assert 1 < min(reported) < len(prompts[0])
    for prompt, deltas in zip(prompts, events, strict=True):
        check(model, prompt, scores_of(deltas, prompt))
        assert [t for event in deltas for t in event.token_ids] == oracle_greedy(model, prompt, 6)


def test_another_engine_continues_where_the_first_one_was_lost(model: Path) -> None:
    """After each of its events, the other engine reports exactly the rest."""
    prompt = random_ids(40, 50)
    (whole,) = run(engine_for(model, max_step_tokens=16), [prompt])
    expected = scores_of(whole, prompt)
    for num_events in range(len(whole)):
        received = whole[:num_events]
        parts = [event.prompt_logprobs for event in received if event.prompt_logprobs is not None]
        reported = parts[-1].end if parts else 0
        output_ids = [token for event in received for token in event.token_ids]
        engine = engine_for(model, max_step_tokens=16)
        if num_events % 2:  # A warm cache may be used only for tokens that were reported.
            run(engine, [prompt], PLAIN)
        rest = engine.new_request("0", prompt, SCORED, output_ids=output_ids, num_prompt_reported=reported)
        engine.loop.submit(rest)
        events = []
        while engine.loop.has_work:
            events += engine.loop.step()
        scores = None
        for event in events:
            scores = joined(scores, event.prompt_logprobs)
        if reported < len(prompt):
            assert scores is not None and scores.start == max(reported, 1)
            for at, want in zip(scores.read(prompt[scores.start :]), expected[scores.start - 1 :], strict=True):
                assert (at.token_id, at.rank) == (want.token_id, want.rank)
                assert at.logprob == pytest.approx(want.logprob, abs=1e-4)
            assert events[-1].num_cached == (max(reported - 1, 0) if num_events % 2 else 0)
        else:
            assert scores is None
        tokens = [token for event in events for token in event.token_ids]
        assert output_ids + tokens == oracle_greedy(model, prompt, 6)


def test_no_more_logits_at_a_time_than_the_bound(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_at_once = 5
    monkeypatch.setattr("engine.runner.model_runner.SLICE_BYTES", 4 * VOCAB * rows_at_once)
    engine = engine_for(model, max_step_tokens=64)
    decoder, counted = engine.runner.decoder, []  # type: ignore[attr-defined]
    logits: Callable[[torch.Tensor], torch.Tensor] = decoder.logits

    def spy(hidden: torch.Tensor) -> torch.Tensor:
        counted.append(len(hidden))
        scored: torch.Tensor = logits(hidden)
        return scored

    monkeypatch.setattr(decoder, "logits", spy)
    prompts = [random_ids(50, 90), random_ids(51, 30)]
    for prompt, events in zip(prompts, run(engine, prompts), strict=True):
        check(model, prompt, scores_of(events, prompt))
    assert max(counted) == rows_at_once
    assert sum(counted) == 89 + 29 + 2 * 6  # each prompt token once, and each row that was sampled


def test_prompts_that_begin_alike_are_computed_once_next_to_one_that_is_scored(model: Path) -> None:
    """With `n`, one choice scores the prompt and the others reuse its KV."""
    engine = engine_for(model, max_step_tokens=32)
    prompt = random_ids(60, 64)
    scored, *others = run(engine, [prompt] * 4, [SCORED, PLAIN, PLAIN, PLAIN])
    check(model, prompt, scores_of(scored, prompt))
    assert all(events[-1].num_cached >= len(prompt) - engine.config.page_size for events in others)


def test_the_offline_api_has_them_one_per_prompt_token() -> None:
    llm = LLM("demo", kv_pages=64)
    texts = ["Return the largest item", "Return"]
    outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=2), progress=False)
    for output in outputs:
        first, *rest = output.prompt_logprobs
        assert first is None
        assert [at.token_id for at in rest if at is not None] == output.prompt_ids[1:]
        assert all(at is not None and len(at.top) == 2 for at in rest)
    assert llm.generate(texts, SamplingParams(max_tokens=1), progress=False)[0].prompt_logprobs == []


def test_the_step_that_memory_is_measured_by_scores_all_its_prompt_tokens() -> None:
    from engine.sampling.prompt_logprobs import spans_to_score

    plan = worst_step(EngineConfig(max_running=4, max_step_tokens=64), max_model_len=256)
    (wanted,) = spans_to_score(plan.chunks)
    assert len(wanted.targets) == plan.chunks[-1].num_tokens - 1
    assert wanted.row + len(wanted.targets) < plan.num_tokens
