"""Embeddings and scores of prompts beside those of `transformers`: in any chunks, cold, warm, preempted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM
from engine.base.errors import NeverFits
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
from engine.values.embedding import values_of
from engine.values.pooling import Pooling
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.engine.support.engines_on_ranks import run_on_ranks
from tests.engine.support.oracle import oracle_greedy, oracle_logits, oracle_model, random_ids, save_tiny

EMBEDDED = SamplingParams(pooling=Pooling())
JUDGED = SamplingParams(pooling=Pooling((7, 42)))
PLAIN = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_tied", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp("model"))


def engine_for(model: Path, **settings: Any) -> Engine:
    config = {"device": "cpu", "page_size": 8, "kv_pages": 128, "max_running": 8, "max_step_ms": None, **settings}
    config.setdefault("tasks", ["generate", "embed", "rerank"])
    return Engine.from_config(EngineConfig(model=str(model), **config))


def run(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[StreamDelta]]:
    """Run all prompts at once to the end, after which nothing is held."""
    events: list[list[StreamDelta]] = [[] for _ in prompts]
    for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        engine.loop.submit(engine.new_request(str(index), prompt, sampling))
    while engine.loop.has_work:
        for event in engine.loop.step():
            events[int(event.request_id)].append(event)
        assert sum(engine.cache.account()) == engine.cache.num_pages
    account = engine.cache.account()
    assert account.locked == account.private == 0
    return events


@torch.inference_mode()
def expected(model: Path, prompt: Sequence[int], params: SamplingParams) -> list[float]:
    """What transformers finds: the last hidden state behind the last norm, or the softmax over two logits."""
    assert params.pooling is not None
    if params.pooling.token_ids:
        last = oracle_logits(model, prompt)[-1]
        return list(last[list(params.pooling.token_ids)].softmax(-1).tolist())
    states = oracle_model(model).model(torch.tensor([list(prompt)])).last_hidden_state
    return list(states[0, -1].float().tolist())


def check(model: Path, prompt: Sequence[int], params: SamplingParams, events: Sequence[StreamDelta]) -> None:
    (end,) = events
    assert (end.finish_reason, end.token_ids) == ("stop", [])
    assert end.pooled is not None and end.timings is not None
    assert values_of(end.pooled).tolist() == pytest.approx(expected(model, prompt, params), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("chunk", "page_size"), [(8, 8), (13, 1), (64, 16), (512, 5)])
def test_values_in_chunks_of_any_size_and_mixed_batches(
    model: Path, chunk: int, page_size: int, overlap: bool
) -> None:
    kv_pages = 1024 // page_size
    engine = engine_for(model, max_step_tokens=chunk, overlap=overlap, page_size=page_size, kv_pages=kv_pages)
    prompts = [random_ids(seed, length) for seed, length in enumerate((70, 9, 2, 33, 1, 40, 16, 64))]
    params = [EMBEDDED, JUDGED, EMBEDDED, PLAIN, EMBEDDED, PLAIN, JUDGED, EMBEDDED]
    for prompt, wanted, events in zip(prompts, params, run(engine, prompts, params), strict=True):
        if wanted is PLAIN:
            tokens = [token for event in events for token in event.token_ids]
            assert tokens == oracle_greedy(model, prompt, 6)
            assert all(event.pooled is None for event in events)
        else:
            check(model, prompt, wanted, events)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cached_prompt_computes_only_its_last_token(model: Path, overlap: bool) -> None:
    engine = engine_for(model, max_step_tokens=24, overlap=overlap)
    prompt = random_ids(10, 61)
    for found, params in ((0, EMBEDDED), (60, EMBEDDED), (60, JUDGED), (60, PLAIN)):
        (events,) = run(engine, [prompt], [params])
        assert events[-1].num_cached == found
        if params is not PLAIN:
            check(model, prompt, params, events)
    longer = [*prompt, *random_ids(11, 20)]
    (events,) = run(engine, [longer], [EMBEDDED])  # the prefix that a generating request left is found, too
    assert events[-1].num_cached == 61
    check(model, longer, EMBEDDED, events)


def test_a_cached_prompt_next_to_decodes_changes_no_token(model: Path) -> None:
    """The step then has one token of each, as a step of decodes has."""
    engine = engine_for(model)
    prompt, other = random_ids(12, 30), random_ids(13, 20)
    run(engine, [prompt], [EMBEDDED])
    engine.loop.submit(engine.new_request("decode", other, PLAIN))
    events = engine.loop.step()
    engine.loop.submit(engine.new_request("pooled", prompt, EMBEDDED))
    while engine.loop.has_work:
        events += engine.loop.step()
    tokens = [token for event in events if event.request_id == "decode" for token in event.token_ids]
    assert tokens == oracle_greedy(model, other, 6)
    check(model, prompt, EMBEDDED, [event for event in events if event.request_id == "pooled"])


def test_speculation_drafts_nothing_for_them(model: Path) -> None:
    engine = engine_for(model, max_step_tokens=24, speculation=Speculation("ngram", adaptive=False, min_match=1))
    repeating = random_ids(15, 7) * 6
    prompts, params = [repeating, repeating[3:], repeating], [EMBEDDED, PLAIN, JUDGED]
    for _ in range(2):
        first, plain, judged = run(engine, prompts, params)
        check(model, repeating, EMBEDDED, first)
        check(model, repeating, JUDGED, judged)
        assert [t for event in plain for t in event.token_ids] == oracle_greedy(model, repeating[3:], 6)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_prompt_has_the_same_values(model: Path, overlap: bool, preemption: str) -> None:
    memory = {"preemption": preemption, "host_kv_gib": 0.01}
    engine = engine_for(model, kv_pages=12, max_step_tokens=8, overlap=overlap, **memory)
    prompts, wanted = [random_ids(45, 66), random_ids(46, 70)], [EMBEDDED, JUDGED]
    requests = [
        engine.new_request(str(at), prompt, params, priority=-at)
        for at, (prompt, params) in enumerate(zip(prompts, wanted, strict=True))
    ]
    events: list[list[StreamDelta]] = [[], []]
    engine.loop.submit(requests[0])
    for step in range(200):
        if step == 4:
            engine.loop.submit(requests[1])
        for event in engine.loop.step() if engine.loop.has_work else ():
            events[int(event.request_id)].append(event)
    assert requests[0].num_preemptions
    for prompt, params, deltas in zip(prompts, wanted, events, strict=True):
        check(model, prompt, params, deltas)


def test_an_aborted_one_frees_its_pages_with_its_step_in_flight(model: Path) -> None:
    engine = engine_for(model, max_step_tokens=16, overlap=True)
    for steps in range(4):
        engine.loop.submit(engine.new_request("a", random_ids(20 + steps, 40), EMBEDDED))
        events = [event for _ in range(steps) for event in engine.loop.step()]
        engine.loop.abort("a")
        while engine.loop.has_work:
            events += engine.loop.step()
        assert [event.finish_reason for event in events] == ["abort"]
        account = engine.cache.account()
        assert account.locked == account.private == 0


@pytest.mark.parametrize("size", [2])
def test_ranks_find_the_same_together(model: Path, size: int) -> None:
    prompts = [random_ids(seed, length) for seed, length in enumerate((3, 40, 61, 1))]
    for params in (EMBEDDED, JUDGED):
        streams, _ = run_on_ranks(model, size, prompts, params)
        for prompt, events in zip(prompts, streams, strict=True):
            check(model, prompt, params, events)


def test_a_prompt_may_take_the_whole_context_and_no_more(model: Path) -> None:
    engine = engine_for(model, max_model_len=64, kv_pages=8)
    whole = random_ids(30, 64)
    (events,) = run(engine, [whole], [EMBEDDED])
    check(model, whole, EMBEDDED, events)
    with pytest.raises(NeverFits, match=r"65 prompt tokens, but this engine holds at most 64 .*max_model_len"):
        engine.loop.submit(engine.new_request("1", [*whole, 1], EMBEDDED))
    with pytest.raises(ValueError, match="token id 101 in the pooling is not in the vocabulary"):
        engine.new_request("2", whole, SamplingParams(pooling=Pooling((101,))))


def test_values_that_are_not_finite_fail_only_that_request(model: Path) -> None:
    engine = engine_for(model)
    decoder: Any = engine.runner.decoder  # type: ignore[attr-defined]
    normed = decoder.normed

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = normed(hidden).clone()
        values[0, 0] = torch.nan
        return values

    decoder.normed = broken
    prompts = [random_ids(40, 9), random_ids(41, 12)]
    failed, fine = run(engine, prompts, [EMBEDDED, EMBEDDED])
    assert failed[-1].finish_reason == "error" and failed[-1].error == "the model computed no valid probabilities"
    check(model, prompts[1], EMBEDDED, fine)


@pytest.mark.parametrize("field", [{"prompt_logprobs": 1}])
def test_pooling_is_refused_with_prompt_logprobs_or_invalid_token_ids(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="prompt_logprobs cannot be combined with pooling"):
        SamplingParams(pooling=Pooling(), **field)
    with pytest.raises(ValueError, match="at most 64"):
        Pooling(tuple(range(65)))
    with pytest.raises(ValueError, match="token ids, got -1"):
        Pooling((-1,))


def test_the_offline_api_embeds_texts() -> None:
    llm = LLM("demo", kv_pages=64, tasks=["embed"])
    texts = ["Return the largest item", "Return the smallest item", "Return the largest item"]
    first, second, third = llm.embed(texts)
    assert np.linalg.norm(first) == pytest.approx(1, abs=1e-5)
    assert first.tolist() == pytest.approx(third.tolist(), abs=1e-5) != second.tolist()
    (cut,) = llm.embed(texts[0], dimensions=8)
    assert cut.tolist() == pytest.approx((first[:8] / np.linalg.norm(first[:8])).tolist(), abs=1e-5)
    (raw,) = llm.embed(texts[0], normalizes=False)
    assert (raw / np.linalg.norm(raw)).tolist() == pytest.approx(first.tolist(), abs=1e-5)
