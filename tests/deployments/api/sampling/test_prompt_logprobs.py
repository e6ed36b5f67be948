"""Prompts and their log-probabilities in answers: echoed, in vLLM's form, streamed, for scoring alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

from deployments.api import ApiService, Limits, create_app
from tests.deployments.support.scripted_api import Client, ScriptedEngine, scripted_score

TEXT = "Once upon a time"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def complete(client: Client, **options: Any) -> Any:
    asked = {"model": "demo", "prompt": TEXT, "max_tokens": 3, **options}
    return client.run(lambda ai: ai.completions.create(**asked))


def stream(client: Client, **options: Any) -> list[Any]:
    async def collect(ai: openai.AsyncOpenAI) -> list[Any]:
        call = {"model": "demo", "prompt": TEXT, "max_tokens": 3, **options, "stream": True}
        return [chunk async for chunk in await ai.completions.create(**call)]

    return client.run(collect)  # type: ignore[return-value]


def joined(chunks: list[Any], index: int = 0) -> dict[str, list[Any]]:
    """A choice's log-probabilities over all chunks."""
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.index == index]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for part in parts if part for value in getattr(part, name)] for name in names}


# --- echo -----------------------------------------------------------------------------------------------------


def test_echo_with_logprobs_begins_with_the_prompt_s(client: Client, engine: ScriptedEngine) -> None:
    choice = complete(client, echo=True, logprobs=2).choices[0]
    ids, logprobs = engine.codec.encode(TEXT), choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert choice.text.startswith(TEXT) and len(logprobs.tokens) == len(ids) + 3
    assert logprobs.token_logprobs == [None, *(-float(at) for at in range(1, len(ids))), -0.5, -0.5, -0.5]
    assert logprobs.top_logprobs[0] is None
    expected = scripted_score(ids, 3, 2)
    assert logprobs.top_logprobs[3] == {
        **{engine.codec.token_key(token): logprob for token, logprob in expected.top},
        engine.codec.token_key(ids[3]): -3.0,
    }
    cuts = [*logprobs.text_offset, len(choice.text)]
    assert [choice.text[a:b] for a, b in pairwise(cuts)] == logprobs.tokens
    (request,) = engine.requests
    assert request.sampling.prompt_logprobs == request.sampling.logprobs == 2


def test_a_stream_has_them_in_its_first_chunk(client: Client) -> None:
    whole = complete(client, echo=True, logprobs=1).choices[0]
    chunks = stream(client, echo=True, logprobs=1)
    assert chunks[0].choices[0].text == TEXT
    assert len(chunks[0].choices[0].logprobs.tokens) == len(whole.logprobs.tokens) - 3
    assert joined(chunks) == {name: getattr(whole.logprobs, name) for name in joined(chunks)}
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text


@pytest.mark.parametrize("streamed", [False, True])
def test_scoring_generates_nothing(client: Client, engine: ScriptedEngine, streamed: bool) -> None:
    """`max_tokens: 0` with echo and logprobs, as evaluation harnesses have it."""
    ids = engine.codec.encode(TEXT)
    if streamed:
        chunks = stream(client, prompt=ids, echo=True, logprobs=1, max_tokens=0)
        logprobs, last = joined(chunks), chunks[-1].choices[0]
    else:
        answer = complete(client, prompt=ids, echo=True, logprobs=1, max_tokens=0)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
        last = answer.choices[0]
        logprobs = dict(last.logprobs)
        assert last.text == TEXT
    assert last.finish_reason == "length"
    assert logprobs["token_logprobs"] == [None, *(-float(at) for at in range(1, len(ids)))]
    assert "".join(logprobs["tokens"]) == TEXT
    assert [request.sampling.max_tokens for request in engine.requests] == [1]


def test_a_prompt_that_is_only_scored_ends_by_length_where_the_model_would_stop(
    client: Client, engine: ScriptedEngine
) -> None:
    engine.says = ""
    answer = complete(client, echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].text == TEXT


def test_a_prompt_of_one_token_has_no_score(client: Client, engine: ScriptedEngine) -> None:
    choice = complete(client, prompt=[100], echo=True, logprobs=1, max_tokens=0).choices[0]
    assert choice.logprobs.token_logprobs == [None]


# --- several choices, several prompts -------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_prompts_are_scored_once_for_all_their_choices(
    client: Client, engine: ScriptedEngine, streamed: bool
) -> None:
    prompts = [engine.codec.encode("one two three"), engine.codec.encode("four five six seven")]
    asked = {"prompt": prompts, "n": 2, "echo": True, "logprobs": 0, "max_tokens": 2}
    if streamed:
        chunks = stream(client, **asked)
        scored = [joined(chunks, index)["token_logprobs"] for index in range(4)]
        for index in range(4):  # the other choice's text has waited for the scores
            first = next(c for chunk in chunks for c in chunk.choices if c.index == index)
            assert first.text and first.logprobs.token_logprobs[0] is None
    else:
        scored = [choice.logprobs.token_logprobs for choice in complete(client, **asked).choices]
    lengths = [len(prompts[index // 2]) for index in range(4)]
    assert scored == [[None, *(-float(at) for at in range(1, n)), -0.5, -0.5] for n in lengths]
    assert [request.sampling.prompt_logprobs for request in engine.requests] == [0, None, 0, None]


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_scores_of_a_candidate_that_is_not_returned_are_not_lost(
    client: Client, engine: ScriptedEngine, max_tokens: int
) -> None:
    """The first of three candidates scores the prompt; whichever two are given bear the scores."""
    asked = {"prompt": [TEXT, "Once"], "n": 2, "best_of": 3, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    choices = complete(client, **asked).choices
    for choice, text in zip(choices, [TEXT, TEXT, "Once", "Once"], strict=True):
        num = len(engine.codec.encode(text))
        expected = [None, *(-float(at) for at in range(1, num)), *[-0.5] * max_tokens]
        assert choice.logprobs.token_logprobs == expected
    assert [request.sampling.prompt_logprobs for request in engine.requests] == [1, None, None] * 2


# --- vLLM's field ---------------------------------------------------------------------------------------------


def expected_entries(engine: ScriptedEngine, ids: list[int], top: int) -> list[Any]:
    entries: list[Any] = [None]
    for position in range(1, len(ids)):
        at = scripted_score(ids, position, top)
        ranked = {at.token_id: (at.logprob, at.rank)}
        ranked |= {token: (lp, rank) for rank, (token, lp) in enumerate(at.top, 1) if token not in ranked}
        entries.append(
            {
                str(token): {"logprob": lp, "rank": rank, "decoded_token": engine.codec.token_text(token)[0]}
                for token, (lp, rank) in ranked.items()
            }
        )
    return entries


def test_completions_have_prompt_logprobs_by_choice(client: Client, engine: ScriptedEngine) -> None:
    answer = complete(client, n=2, extra_body={"prompt_logprobs": 2})
    expected = expected_entries(engine, engine.codec.encode(TEXT), 2)
    assert [choice.prompt_logprobs for choice in answer.choices] == [expected, expected]
    assert answer.choices[0].logprobs is None


def test_a_chat_has_them_once(client: Client, engine: ScriptedEngine) -> None:
    answer = client.post("/v1/chat/completions", CHAT | {"prompt_logprobs": 1, "n": 2}).json()
    assert answer["prompt_logprobs"] == expected_entries(engine, engine.requests[0].prompt_ids, 1)
    assert "prompt_logprobs" not in client.post("/v1/chat/completions", CHAT).json()


def test_each_form_has_as_many_alternatives_as_it_asked_for(client: Client, engine: ScriptedEngine) -> None:
    choice = complete(client, echo=True, logprobs=1, extra_body={"prompt_logprobs": 3}).choices[0]
    assert engine.requests[0].sampling.prompt_logprobs == 3
    assert choice.prompt_logprobs == expected_entries(engine, engine.codec.encode(TEXT), 3)
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs[4:-3])


def test_scoring_needs_no_echo(client: Client, engine: ScriptedEngine) -> None:
    choice = complete(client, max_tokens=0, extra_body={"prompt_logprobs": 0}).choices[0]
    assert choice.text == "" and len(choice.prompt_logprobs) == len(engine.codec.encode(TEXT))


# --- limits and failures --------------------------------------------------------------------------------------


def test_the_error_names_the_requested_number_and_the_limit(client: Client) -> None:
    body = {"model": "demo", "prompt": [[5] * 400] * 64, "echo": True, "logprobs": 5, "n": 2, "max_tokens": 0}
    error = client.post("/v1/completions", body).json()["error"]
    assert error["param"] == "logprobs" and "307200" in error["message"] and "200000" in error["message"]


def test_long_answers_are_spelled_in_a_thread_all_the_same(
    service: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for inline in (0, 10**6):
        monkeypatch.setattr(Limits, "inline_logprobs", inline)
        client = Client(httpx.ASGITransport(create_app(service)))
        asked = {"echo": True, "logprobs": 2, "extra_body": {"prompt_logprobs": 1}}
        answers.append(complete(client, **asked).choices)
        del asked["extra_body"]
        answers.append([chunk.choices for chunk in stream(client, **asked)])
    assert answers[:2] == answers[2:]


@pytest.mark.parametrize("streamed", [False, True])
def test_an_engine_that_scores_nothing_has_failed(client: Client, engine: ScriptedEngine, streamed: bool) -> None:
    engine.scores = False
    body = {"model": "demo", "prompt": TEXT, "echo": True, "logprobs": 1, "stream": streamed}
    response = client.post("/v1/completions", body)
    assert response.status_code == 500 and response.json()["error"]["code"] == "engine_error"
