"""Text completions: prompts of all kinds, echo, n and logprobs."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.deployments.support.scripted_api import MAX_MODEL_LEN, STOP, Client, ScriptedEngine


def complete(client: Client, **options: Any) -> Any:
    return client.run(lambda ai: ai.completions.create(**{"model": "demo", "prompt": "Once", **options}))


def stream(client: Client, **options: Any) -> list[Any]:
    async def collect(ai: openai.AsyncOpenAI) -> list[Any]:
        call = {"model": "demo", "prompt": "Once", **options, "stream": True}
        return [chunk async for chunk in await ai.completions.create(**call)]

    return client.run(collect)  # type: ignore[return-value]


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index)


def test_sixteen_tokens_by_default(client: Client, engine: ScriptedEngine) -> None:
    engine.says = "word " * 50
    answer = complete(client)
    assert answer.usage.completion_tokens == 16 and answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "options", [{}, {"n": 2}, {"best_of": 2}, {"use_beam_search": True}, {"ignore_eos": True}]
)
def test_the_default_is_cut_to_the_room_that_each_prompt_leaves(
    client: Client, engine: ScriptedEngine, options: dict[str, Any]
) -> None:
    """A maximum that the client gives is not: it would get less than it asked for."""
    prompts = [[7] * (MAX_MODEL_LEN - left) for left in (1, 5, 16, 100)]
    body = {"model": "demo", "prompt": prompts, **options}
    assert client.post("/v1/completions", body).status_code == 200
    asked = {(MAX_MODEL_LEN - len(request.prompt_ids), request.sampling.max_tokens) for request in engine.requests}
    assert asked == {(1, 1), (5, 5), (16, 16), (100, 16)}
    refused = client.post("/v1/completions", body | {"max_tokens": 16})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    refused = client.post("/v1/completions", body | {"prompt": [7] * MAX_MODEL_LEN})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_an_answer_that_must_be_longer_than_the_room_is_refused(client: Client, engine: ScriptedEngine) -> None:
    body = {"model": "demo", "prompt": [7] * (MAX_MODEL_LEN - 5), "min_tokens": 6}
    error = client.post("/v1/completions", body).json()["error"]
    assert error["param"] == "min_tokens" and "[0, 5]" in error["message"] and not engine.requests
    assert client.post("/v1/completions", body | {"min_tokens": 5}).status_code == 200


@pytest.mark.parametrize(
    "options",
    [
        {"echo": True},
        {"echo": True, "logprobs": 1},
        {"echo": True, "logprobs": 1, "stream": True},
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 0, "prompt_logprobs": 1, "n": 2},
        {"echo": True, "truncate_prompt_tokens": -1},
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_a_prompt_that_is_not_continued_may_fill_the_context(
    client: Client, engine: ScriptedEngine, options: dict[str, Any], as_text: bool
) -> None:
    ids = engine.codec.encode("a" * 4000)[:MAX_MODEL_LEN]
    prompt: Any = engine.codec.decode(ids) if as_text else ids
    assert len(engine.codec.encode(prompt) if as_text else ids) == MAX_MODEL_LEN
    body = {"model": "demo", "prompt": prompt, "max_tokens": 0, **options}
    response = client.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    assert {len(request.prompt_ids) for request in engine.requests} <= {MAX_MODEL_LEN}
    error = client.post("/v1/completions", body | {"prompt": [*ids, 7], "truncate_prompt_tokens": None})
    assert error.status_code == 400 and "512 tokens" in error.json()["error"]["message"]


def test_prompts_as_text_and_as_ids_are_the_same_prompt(client: Client, engine: ScriptedEngine) -> None:
    ids = engine.codec.encode("Once upon")
    for prompt in ("Once upon", ids, ["Once upon"], [ids]):
        complete(client, prompt=prompt)
    assert [request.prompt_ids for request in engine.requests] == [ids] * 4


def test_several_prompts_with_several_choices_are_ordered_by_prompt(
    client: Client, engine: ScriptedEngine
) -> None:
    engine.says = lambda request: f"{engine.codec.decode(request.prompt_ids)} {request.sampling.seed}"
    answer = complete(client, prompt=["A", "B"], n=2, seed=1)
    assert [choice.text for choice in answer.choices] == ["A 1", "A 2", "B 1", "B 2"]
    chunks = stream(client, prompt=["A", "B"], n=2, seed=1, stream_options={"include_usage": True})
    assert [text_of(chunks, index) for index in range(4)] == ["A 1", "A 2", "B 1", "B 2"]
    assert chunks[-1].usage == answer.usage
    assert answer.usage.prompt_tokens == 2


def test_echo_precedes_the_text(client: Client) -> None:
    whole = complete(client, echo=True, max_tokens=100).choices[0].text
    assert whole == "OnceThe quick brown fox jumps over the lazy dog."
    assert text_of(stream(client, echo=True, max_tokens=100)) == whole


def test_echo_of_nothing_generates_nothing(client: Client, engine: ScriptedEngine) -> None:
    ids = engine.codec.encode("Once upon")
    answer = complete(client, prompt=ids, echo=True, max_tokens=0)
    assert answer.choices[0].text == "Once upon"
    assert answer.usage.completion_tokens == 0 and answer.usage.prompt_tokens == len(ids)
    assert text_of(stream(client, echo=True, max_tokens=0)) == "Once"
    assert engine.requests == []


def test_logprobs_name_tokens_offsets_and_alternatives(client: Client, engine: ScriptedEngine) -> None:
    logprobs = complete(client, logprobs=2, max_tokens=5).choices[0].logprobs
    assert "".join(logprobs.tokens) == "The quick b"
    assert logprobs.text_offset == [0, 3, 4, 7, 9]
    assert logprobs.token_logprobs == [-0.5] * 5
    assert all(len(top) == 3 for top in logprobs.top_logprobs)  # two, and the chosen one
    chunks = stream(client, logprobs=2, max_tokens=5)
    offsets = [o for chunk in chunks for c in chunk.choices if c.logprobs for o in c.logprobs.text_offset]
    assert offsets == logprobs.text_offset


def test_a_stream_has_the_ids_of_tokens_without_text(client: Client, engine: ScriptedEngine) -> None:
    engine.says = "世界 🌍!"
    ids = {"extra_body": {"return_token_ids": True}}
    choices = [choice for event in stream(client, **ids) for choice in event.choices]
    told = [token for choice in choices for token in getattr(choice, "token_ids", [])]
    assert told == complete(client, **ids).choices[0].token_ids


def test_no_stop_token_in_the_text(client: Client, engine: ScriptedEngine) -> None:
    engine.says = "ab"
    answer = complete(client)
    assert answer.choices[0].text == "ab" and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("chunk", [1, 100])
def test_a_stop_token_is_among_the_tokens_and_their_logprobs(
    client: Client, engine: ScriptedEngine, chunk: int
) -> None:
    """As in vLLM: lm-eval counts on one entry for each token of `max_tokens`, and trainers on the end's."""
    engine.says, engine.chunk = "ab", chunk
    asked: dict[str, Any] = {"logprobs": 1, "extra_body": {"return_token_ids": True}}
    choice = complete(client, **asked).choices[0]
    ids = [*engine.codec.encode("ab", add_special_tokens=False), STOP]
    assert (choice.text, choice.token_ids) == ("ab", ids)
    assert choice.logprobs.tokens[-1] == "<|im_end|>"
    assert len(choice.logprobs.token_logprobs) == len(ids)
    assert choice.logprobs.text_offset[-1] == len("ab")
    parts = [c for chunk in stream(client, **asked) for c in chunk.choices]
    assert [token for part in parts for token in getattr(part, "token_ids", [])] == ids
    assert [text for part in parts if part.logprobs for text in part.logprobs.tokens] == choice.logprobs.tokens


def test_an_echoed_prompt_is_followed_by_one_token_whichever_it_is(client: Client, engine: ScriptedEngine) -> None:
    """What lm-eval sends for a log-likelihood; it cuts off the last entry, which must be the generated token's."""
    prompt = engine.codec.encode("Once upon")
    counts = []
    for engine.says in ("", "ab"):
        answer = complete(client, prompt=prompt, echo=True, max_tokens=1, logprobs=1)
        counts.append(len(answer.choices[0].logprobs.token_logprobs))
    assert counts == [len(prompt) + 1] * 2
