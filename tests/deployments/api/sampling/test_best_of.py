"""`best_of`: more answers are generated than given; the likeliest per token are given, and all are paid for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from deployments.client.protocol import GenerateRequest
from engine.values.logprobs import TokenLogprobs
from engine.values.stream_delta import StreamDelta
from tests.deployments.support.scripted_api import Client, ScriptedEngine

WORDS = ("alpha", "beta gamma delta", "epsilon", "zeta")


@pytest.fixture
def ranked(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """Candidate i says WORDS[i]; `LIKELY[i]` is the log-probability of each of its tokens."""
    plain = engine.events

    def events(request: GenerateRequest) -> list[StreamDelta | Exception]:
        logprob = (-2.0, -0.5, -0.7, -9.0)[candidate(request) % 4]
        return [
            msgspec.structs.replace(
                event, logprobs=tuple(TokenLogprobs(at.token_id, logprob, at.top) for at in event.logprobs or ())
            )
            for event in plain(request)
            if isinstance(event, StreamDelta)
        ]

    monkeypatch.setattr(engine, "events", events)
    engine.says = lambda request: WORDS[candidate(request) % 4]
    engine.cached = 1
    return engine


def candidate(request: GenerateRequest) -> int:
    return int(request.request_id.rsplit("-", 1)[1])


def complete(client: Client, **options: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", {"model": "demo", "prompt": "Once", "max_tokens": 50, **options})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def texts(answer: dict[str, Any]) -> Sequence[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def test_the_likeliest_per_token_are_given_best_first(client: Client, ranked: ScriptedEngine) -> None:
    """Answers are ranked by the mean: a sum would prefer short ones."""
    assert texts(complete(client, best_of=4)) == ["beta gamma delta"]
    assert texts(complete(client, best_of=4, n=3)) == ["beta gamma delta", "epsilon", "alpha"]


def test_usage_counts_all_that_was_generated(client: Client, ranked: ScriptedEngine) -> None:
    usage = complete(client, best_of=4)["usage"]
    generated = sum(len(ranked.codec.encode(words, add_special_tokens=False)) + 1 for words in WORDS)
    assert usage["completion_tokens"] == generated
    assert usage["prompt_tokens"] == 2 and usage["prompt_tokens_details"]["cached_tokens"] == 1


def test_each_prompt_has_its_own_best(client: Client, ranked: ScriptedEngine) -> None:
    ranked.says = lambda request: f"{ranked.codec.decode(request.prompt_ids)} {WORDS[candidate(request) % 4]}"
    answer = complete(client, prompt=["A", "B"], best_of=4, n=2, seed=7, include_timings=True, echo=True)
    assert texts(answer) == ["AA beta gamma delta", "AA epsilon", "BB beta gamma delta", "BB epsilon"]
    assert [request.sampling.seed for request in ranked.requests] == [7, 8, 9, 10] * 2
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    timings = answer["timings"]
    assert timings["output_tokens"] == answer["usage"]["completion_tokens"]
    assert [choice["prompt_tokens"] for choice in timings["choices"]] == [1] * 8


def test_log_probabilities_are_shown_only_on_request(client: Client, ranked: ScriptedEngine) -> None:
    assert complete(client, best_of=4)["choices"][0]["logprobs"] is None
    assert [request.sampling.logprobs for request in ranked.requests] == [0] * 4
    shown = complete(client, best_of=4, logprobs=2)["choices"][0]["logprobs"]
    assert set(shown["token_logprobs"]) == {-0.5} and len(shown["top_logprobs"][0]) == 3


def test_candidates_that_are_all_returned_are_not_ranked(client: Client, ranked: ScriptedEngine) -> None:
    assert texts(complete(client, best_of=2, n=2)) == ["alpha", "beta gamma delta"]
    assert ranked.requests[0].sampling.logprobs is None


def test_a_stop_string_s_tokens_rank_as_far_as_they_are_given(client: Client, ranked: ScriptedEngine) -> None:
    answer = complete(client, best_of=4, n=3, stop=[" gamma"])
    assert texts(answer) == ["beta", "epsilon", "alpha"]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_chats_have_it_too(client: Client, ranked: ScriptedEngine) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "n": 2}
    answer = client.post("/v1/chat/completions", {**body, "best_of": 4}).json()
    assert [c["message"]["content"] for c in answer["choices"]] == ["beta gamma delta", "epsilon"]
    assert answer["choices"][0]["logprobs"] is None
    for wrong, param in (({"best_of": 1}, "best_of"), ({"best_of": 3, "stream": True}, "stream")):
        refused = client.post("/v1/chat/completions", {**body, **wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_refusal_names_the_expected_value(client: Client, ranked: ScriptedEngine) -> None:
    refused = client.post("/v1/completions", {"model": "demo", "prompt": "x", "n": 3, "best_of": 2})
    assert "best_of must be at least n (3)" in refused.json()["error"]["message"]
    assert ranked.requests == []


def test_nothing_to_generate_is_nothing_to_rank(client: Client, ranked: ScriptedEngine) -> None:
    answer = complete(client, echo=True, max_tokens=0, best_of=3, n=2)
    assert texts(answer) == ["Once", "Once"] and ranked.requests == []
