"""A request cut at any of its tokens goes on in a fresh engine as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.values.logprobs import TokenLogprobs
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from tests.engine.support.hash_model import says
from tests.engine.support.oracle import save_tiny
from tests.engine.support.script import EOS, Script, next_token
from tests.engine.support.whole_engines import tokens_of

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3]
NUM_TOKENS = 14


# --- real models: every way of choosing tokens ---------------------------------------------------------------

DRAWN: dict[str, Any] = {"temperature": 1.2, "seed": 11}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": DRAWN,
    "top_p": {**DRAWN, "top_p": 0.8},
    "top_k": {**DRAWN, "top_k": 7},
    "min_p": {**DRAWN, "min_p": 0.05},
    "all at once": {**DRAWN, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "presence": {"temperature": 0, "presence_penalty": 1.5},
    "frequency": {**DRAWN, "frequency_penalty": 1.0},
    "repetition": {"temperature": 0, "repetition_penalty": 1.7},
    "bias": {**DRAWN, "logit_bias": {5: 4.0, 6: -100.0, 40: 3.0}},
    "logprobs": {**DRAWN, "logprobs": 3},
    "end of text forbidden at first": {**DRAWN, "min_tokens": 9, "logit_bias": {7: 6.0}},
    "end of text ignored": {**DRAWN, "ignore_eos": True, "logit_bias": {7: 6.0}},
}
"""7 is the end of text of these models."""


@pytest.fixture(scope="module", params=["llama3.1", "mistral", "qwen2_sliding", "qwen3_tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp("model"), eos_token_id=7)


def generate(model: Path, sampling: SamplingParams, given: list[list[int]]) -> list[list[StreamDelta]]:
    """The events of requests that resume with the `given` outputs, all at once in a fresh engine."""
    engine = Engine.from_config(EngineConfig(model=str(model), device="cpu", page_size=8, kv_pages=256))
    events: list[list[StreamDelta]] = [[] for _ in given]
    for index, output_ids in enumerate(given):
        engine.loop.submit(engine.new_request(str(index), PROMPT, sampling, output_ids=output_ids))
    while engine.loop.has_work:
        for event in engine.loop.step():
            events[int(event.request_id)].append(event)
    account = engine.cache.account()
    assert account.locked == account.private == 0
    return events


def check_every_cut(model: Path, sampling: SamplingParams) -> list[int]:
    """Cut after 0, 1, ... all tokens: the rest, its log-probabilities and its end are the same. The tokens."""
    (whole,) = generate(model, sampling, [[]])
    tokens = tokens_of(whole)
    cuts = range(len(tokens) + 1)
    for cut, rest in zip(cuts, generate(model, sampling, [tokens[:cut] for cut in cuts]), strict=True):
        assert tokens_of(rest) == tokens[cut:], cut
        assert rest[-1].finish_reason == whole[-1].finish_reason, cut
        assert [p.token_id for p in logprobs_of(rest)] == [p.token_id for p in logprobs_of(whole)[cut:]]
        for resumed, undisturbed in zip(logprobs_of(rest), logprobs_of(whole)[cut:], strict=True):
            assert resumed.logprob == pytest.approx(undisturbed.logprob, abs=1e-4)
            assert dict(resumed.top) == pytest.approx(dict(undisturbed.top), abs=1e-4)
    return tokens


def logprobs_of(events: list[StreamDelta]) -> list[TokenLogprobs]:
    return [logprobs for event in events for logprobs in event.logprobs or ()]


@pytest.mark.parametrize("choice", CHOICES)
def test_the_rest_is_the_same_wherever_it_was_cut(model: Path, choice: str) -> None:
    sampling = SamplingParams(**{"max_tokens": NUM_TOKENS, **CHOICES[choice]})
    tokens = check_every_cut(model, sampling)
    assert len(tokens) >= (10 if "forbidden" in choice else 1)
    if "ignored" in choice:
        assert len(tokens) == NUM_TOKENS
        assert 7 in tokens


def test_stop_tokens_end_it_on_either_side(model: Path) -> None:
    free = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **DRAWN)
    tokens = check_every_cut(model, free)
    stop = tokens[8]
    ends = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=(stop,), **DRAWN)
    assert check_every_cut(model, ends) == tokens[: tokens.index(stop) + 1]


# --- scripted: every shape of memory and steps on either side -------------------------------------------------


@st.composite
def engines(draw: st.DrawFn) -> Script:
    """An engine with room for the request at least, and other requests in it that may preempt it."""
    page_size = draw(st.sampled_from([1, 3, 4, 16]))
    room = 64 // page_size + 1  # the longest request below
    script = Script(
        num_pages=draw(st.integers(room, 2 * room)),
        page_size=page_size,
        limits={"max_step_tokens": draw(st.integers(1, 80)), "max_running": draw(st.integers(1, 4))},
        prefix_cache=draw(st.booleans()),
    )
    for number in range(draw(st.integers(0, 3))):
        rival = draw(st.sampled_from([range(1, 21), range(1, 9), range(300 + number, 330)]))
        script.arrive(rival, max_tokens=draw(st.integers(1, 30)))
        if draw(st.booleans()):
            script.step()
    return script


@settings(max_examples=200, deadline=None)
@given(data=st.data(), first=engines(), second=engines())
def test_memory_and_steps_on_either_side_do_not_matter(data: st.DataObject, first: Script, second: Script) -> None:
    prompt = list(range(1, data.draw(st.integers(2, 31))))
    max_tokens = data.draw(st.integers(1, 30))
    min_tokens = data.draw(st.integers(0, max_tokens))
    free = says(prompt, max_tokens)
    stop = data.draw(st.sampled_from([None, *free]))
    whole = says(prompt, max_tokens, stop, min_tokens)
    cut = data.draw(st.integers(0, len(whole)), label="cut")
    stops: dict[str, Any] = {"stop_token_ids": () if stop is None else (stop,), "min_tokens": min_tokens}

    a = first.arrive(prompt, max_tokens=max_tokens, **stops)
    first.run(until=lambda: len(first.tokens(a)) >= cut)
    assert first.tokens(a)[:cut] == whole[:cut]
    b = second.arrive(prompt, max_tokens=max_tokens, output_ids=whole[:cut], **stops)
    second.run()
    assert second.tokens(b) == whole[cut:]
    assert second.reason(b) == ("stop" if whole[-1] == stop and len(whole) > min_tokens else "length")
    assert second.nothing_held()


# --- nothing is left to do ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output_ids", "options", "reason"),
    [
        ([5, 6, 7], {"max_tokens": 3}, "length"),
        ([5, 6, 7, 8], {"max_tokens": 3}, "length"),
        ([5, 6, EOS], {}, "stop"),
        ([5, 6, 9], {"stop_token_ids": (9,)}, "stop"),
        ([5, 6, 9], {"max_tokens": 3, "stop_token_ids": (9,)}, "stop"),
    ],
)
def test_a_resumed_request_that_had_ended_ends_immediately(
    output_ids: list[int], options: dict[str, Any], reason: str
) -> None:
    """The replica was lost between the last token and the report of the end: no further token is computed."""
    script = Script()
    a = script.arrive(range(1, 11), output_ids=output_ids, **options)
    script.run()
    assert (script.tokens(a), script.reason(a)) == ([], reason)
    assert script.runner.plans == []
    assert script.nothing_held()


@pytest.mark.parametrize(
    ("output_ids", "options"),
    [
        ([5, 6, EOS], {"ignore_eos": True}),
        ([5, 6, EOS], {"min_tokens": 3}),
        ([5, EOS, 6], {}),
    ],
)
def test_an_end_that_did_not_count_then_does_not_count_now(output_ids: list[int], options: dict[str, Any]) -> None:
    script = Script()
    a = script.arrive(range(1, 11), output_ids=output_ids, **options)
    script.run()
    assert len(script.tokens(a)) == 8 - len(output_ids)
    assert script.tokens(a)[0] == next_token([*range(1, 11), *output_ids], 7)
    assert script.reason(a) == "length"


def test_a_resumed_request_that_fills_the_model_s_context_ends_immediately() -> None:
    script = Script(limits={"max_model_len": 16})
    a = script.arrive(range(1, 9), max_tokens=8, output_ids=[5] * 8)
    script.run()
    assert (script.tokens(a), script.reason(a)) == ([], "length")
