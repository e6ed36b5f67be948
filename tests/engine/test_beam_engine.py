"""Beam search in whole engines against `transformers`: alone, beside other requests, under preemption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.values.beam_search import BeamParams, EarlyStopping
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.engine.support.oracle import (
    BEAM_EOS,
    assert_same_hypotheses,
    oracle_beams,
    oracle_greedy,
    random_ids,
    save_tiny,
)

FAMILIES = ["llama3.1", "mistral", "qwen3"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp("model"), eos_token_id=BEAM_EOS)


def engine_for(model: Path, page_size: int = 4, num_tokens: int = 2048, **settings: Any) -> Engine:
    config = EngineConfig(
        model=str(model), device="cpu", page_size=page_size, kv_pages=num_tokens // page_size, **settings
    )
    return Engine.from_config(config)


def searching(
    width: int,
    n: int,
    num_returned: int = 1,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    **params: Any,
) -> SamplingParams:
    beams = BeamParams(width, num_returned, length_penalty, early_stopping)
    return SamplingParams(max_tokens=n, beams=beams, **params)


def run(engine: Engine, jobs: Sequence[tuple[list[int], SamplingParams]]) -> list[list[StreamDelta]]:
    """Run all requests at once to the end."""
    events: list[list[StreamDelta]] = [[] for _ in jobs]
    for index, (prompt, params) in enumerate(jobs):
        engine.loop.submit(engine.new_request(str(index), prompt, params))
    for _ in range(10_000):
        if not engine.loop.has_work:
            break
        for event in engine.loop.step():
            events[int(event.request_id)].append(event)
        assert sum(engine.cache.account()) == engine.cache.num_pages
    account = engine.cache.account()
    assert account.locked == account.private == 0
    return events


def assert_found(
    model: Path, job: tuple[list[int], SamplingParams], events: list[StreamDelta], **options: Any
) -> None:
    """Assert that there is one event, with the hypotheses that transformers finds."""
    prompt, params = job
    assert params.beams is not None and len(events) == 1, events
    eos = [] if params.ignore_eos else BEAM_EOS
    expected = oracle_beams(model, prompt, params.beams, params.max_tokens, eos, **options)
    assert_same_hypotheses(events[0].alternatives or (), expected)
    assert (events[0].token_ids, events[0].finish_reason) == (
        list(expected[0].token_ids),
        expected[0].finish_reason,
    )


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("overlap", [False, True])
def test_widths_and_penalties_together_in_one_batch(
    model: Path, early_stopping: EarlyStopping, overlap: bool
) -> None:
    """Six searches beside plain requests, prompts that begin alike and in chunks; the second time warm."""
    engine = engine_for(model, max_step_tokens=32, max_running=32, overlap=overlap)
    base = random_ids(1, 30)
    jobs = []
    for width in range(1, 7):
        penalty = (0.0, 1.0, 1.7, -0.5, 1.0, 0.3)[width - 1]
        prompt = [*base[: 7 * width % 31], *random_ids(width, 5)]
        num_returned = (width + 1) // 2
        params = searching(width, 6 + width, num_returned, penalty, early_stopping, ignore_eos=width % 3 == 0)
        jobs += [(prompt, params), (prompt, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))]
    for _ in range(2):
        for (prompt, params), events in zip(jobs, run(engine, jobs), strict=True):
            if params.beams is not None:
                assert_found(model, (prompt, params), events)
            else:
                assert [t for event in events for t in event.token_ids] == oracle_greedy(model, prompt, 9)


@pytest.mark.parametrize("page_size, num_tokens", [(1, 120), (4, 136), (16, 160)])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_under_preemption_it_ends_with_the_same_result(
    model: Path, page_size: int, num_tokens: int, prefix_cache: bool
) -> None:
    """Memory for little more than the largest search alone."""
    settings = {"max_step_tokens": 24, "max_running": 24, "prefix_cache": prefix_cache}
    engine = engine_for(model, page_size, num_tokens, **settings)
    jobs = [(random_ids(20 + i, 14 + i), searching(2 + i % 3, 24, 2, ignore_eos=True)) for i in range(5)]
    jobs.append((random_ids(40, 20), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)))
    found = run(engine, jobs)
    for job, events in zip(jobs[:5], found, strict=False):
        assert_found(model, job, events)
    assert [t for event in found[5] for t in event.token_ids] == oracle_greedy(model, jobs[5][0], 20)
    # With pages so large, admission leaves none to compete for.
    assert engine.loop.load().num_preemptions > 0 or page_size == 16


def test_penalties_bias_and_least_lengths_are_those_of_transformers(model: Path) -> None:
    engine = engine_for(model)
    for options, theirs in (
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"min_tokens": 6}, {"min_new_tokens": 6}),
        ({"logit_bias": {BEAM_EOS[0]: 4.0, 7: -3.0}}, {"sequence_bias": [[[BEAM_EOS[0]], 4.0], [[7], -3.0]]}),
    ):
        job = (random_ids(3, 12), searching(4, 10, 3, **options))
        assert_found(model, job, run(engine, [job])[0], **theirs)
