"""Beam search in the API: what may be asked for, what an engine is asked, how its one event becomes choices."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.client.protocol import GenerateRequest
from engine.values.beam_search import BeamParams, Hypothesis
from engine.values.stream_delta import StreamDelta
from tests.deployments.support.scripted_api import Client, ScriptedEngine

TEXT: dict[str, Any] = {"model": "demo", "prompt": "Once", "use_beam_search": True}
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "hi"}],
    "use_beam_search": True,
}


@pytest.fixture
def searching(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """Finds "found 0", which ends by itself, "found 1" which does not, ..."""

    def events(request: GenerateRequest) -> list[StreamDelta | Exception]:
        assert request.sampling.beams is not None
        found = []
        for rank in range(request.sampling.beams.num_returned):
            ids = engine.codec.encode(f"found {rank}", add_special_tokens=False)
            is_stopped = rank % 2 == 0
            found.append(Hypothesis((*ids, *[2] * is_stopped), -rank - 0.5, "stop" if is_stopped else "length"))
        best = found[0]
        return [
            StreamDelta(
                request.request_id,
                list(best.token_ids),
                finish_reason=best.finish_reason,
                num_cached=1,
                alternatives=found,
            )
        ]

    monkeypatch.setattr(engine, "events", events)
    return engine


def test_one_generation_becomes_all_choices_best_first(client: Client, searching: ScriptedEngine) -> None:
    answer = client.post("/v1/completions", {**TEXT, "n": 3, "include_timings": True}).json()
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "found 0", "stop"),
        (1, "found 1", "length"),
        (2, "found 2", "stop"),
    ]
    (request,) = searching.requests
    assert request.sampling.beams == BeamParams(width=3, num_returned=3)
    generated = sum(len(searching.codec.encode(f"found {i}", add_special_tokens=False)) for i in range(3)) + 2
    assert answer["usage"]["completion_tokens"] == answer["timings"]["output_tokens"] == generated
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1


def test_prompts_have_a_search_each(client: Client, searching: ScriptedEngine) -> None:
    body = {**TEXT, "prompt": ["A", "B"], "n": 2, "best_of": 4, "echo": True, "return_token_ids": True}
    answer = client.post("/v1/completions", body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["Afound 0", "Afound 1", "Bfound 0", "Bfound 1"]
    assert [request.sampling.beams for request in searching.requests] == [BeamParams(4, 2)] * 2
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


def test_chats_have_it_too(client: Client, searching: ScriptedEngine) -> None:
    body = {**CHAT, "best_of": 5, "length_penalty": 0.6, "early_stopping": "never", "temperature": 0}
    answer = client.post("/v1/chat/completions", body).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["found 0"]
    (request,) = searching.requests
    assert request.sampling.beams == BeamParams(5, 1, 0.6, "never")
    assert request.sampling.logprobs is None


def test_parameters_that_change_the_log_probabilities_are_accepted(
    client: Client, searching: ScriptedEngine
) -> None:
    body = {**TEXT, "repetition_penalty": 1.2, "logit_bias": {"5": 1}, "min_tokens": 2, "stop_token_ids": [9]}
    assert client.post("/v1/completions", {**body, "seed": 3, "temperature": 1}).status_code == 200
    sampling = searching.requests[0].sampling
    assert (sampling.repetition_penalty, sampling.logit_bias, sampling.min_tokens) == (1.2, {5: 1.0}, 2)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"stream": True}, "stream"),
    ({"best_of": 9}, "best_of"),
    ({"best_of": 17}, "best_of"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"n": 9}, "n"),
    ({"temperature": 0.7}, "temperature"),
    ({"top_p": 0.9}, "top_p"),
    ({"top_k": 5}, "top_k"),
    ({"min_p": 0.1}, "min_p"),
    ({"stop": "x"}, "stop"),
    ({"length_penalty": 11}, "length_penalty"),
    ({"length_penalty": "1"}, "length_penalty"),
    ({"early_stopping": "always"}, "early_stopping"),
    ({"early_stopping": 1}, "early_stopping"),
    ({"use_beam_search": 1}, "use_beam_search"),
    ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
]


@pytest.mark.parametrize("change, param", BAD, ids=str)
def test_a_field_that_beam_search_does_not_support_is_named(
    client: Client, searching: ScriptedEngine, change: dict[str, Any], param: str
) -> None:
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        refused = client.post(path, {**body, **change})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param
    assert searching.requests == []


def test_log_probabilities_of_single_tokens_are_refused(client: Client, searching: ScriptedEngine) -> None:
    for path, body in (
        ("/v1/completions", {**TEXT, "logprobs": 0}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True}),
    ):
        refused = client.post(path, body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    echoed = client.post("/v1/completions", {**TEXT, "logprobs": 0, "echo": True})
    assert echoed.json()["error"]["param"] == "logprobs"


@pytest.mark.parametrize(
    "field, value",
    [("response_format", {"type": "json_object"}), ("structured_outputs", {"choice": ["a", "b"]})],
)
def test_a_grammar_is_refused_by_the_field_that_asks_for_it(
    client: Client, searching: ScriptedEngine, field: str, value: object
) -> None:
    refused = client.post("/v1/completions", {**TEXT, field: value})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert "use_beam_search" in refused.json()["error"]["message"]


def test_calls_that_a_grammar_ensures_are_refused(client: Client, searching: ScriptedEngine) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {**CHAT, "tools": tools, "response_format": {"type": "text"}}
    refused = client.post("/v1/chat/completions", {**body, "tool_choice": "required"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    assert client.post("/v1/chat/completions", {**body, "tool_choice": "auto"}).status_code == 200


def test_neutral_values_without_a_search_are_no_error(client: Client) -> None:
    body = {**TEXT, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}
    assert client.post("/v1/completions", body).status_code == 200


def test_a_search_that_fails_is_an_error(client: Client, engine: ScriptedEngine) -> None:
    engine.fail_after = (0, StreamDelta("x", finish_reason="error", error="no pages"))
    assert client.post("/v1/completions", {**TEXT, "n": 2}).status_code == 500
