"""POST /v1/messages: answers, whole and streamed, are what Anthropic's clients expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deployments.client.protocol import ReplicaLost
from engine.values.stream_delta import StreamDelta
from tests.deployments.api.anthropic.conftest import MESSAGES, Messages, alike, events_of
from tests.deployments.support.chat_templates import HERMES
from tests.support.metric_values import snapshot_of

Make = Callable[..., Messages]
SAID = "The quick brown fox jumps over the lazy dog."


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_an_answer(ask: Make, chunk: int) -> None:
    it = ask()
    it.engine.chunk = chunk
    message = alike(it)
    usage = message.pop("usage")
    assert message == {
        "type": "message", "role": "assistant", "model": "demo", "content": [{"type": "text", "text": SAID}],
        "stop_reason": "end_turn", "stop_sequence": None,
    }  # fmt: skip
    prompt = len(it.engine.requests[0].prompt_ids)
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (
        prompt,
        0,
        0,
    )
    assert usage["output_tokens"] == len(it.engine.codec.encode(SAID, add_special_tokens=False)) + 1


def test_the_sequence_of_a_streams_events(ask: Make) -> None:
    it = ask()
    it.engine.says = "Yes."
    names = [name for name, _ in it.events()]
    num_deltas = names.count("content_block_delta")
    assert num_deltas > 0 and names == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * num_deltas,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


def test_cached_tokens_are_no_input_tokens(ask: Make) -> None:
    it = ask()
    it.engine.cached = 5
    prompt = it.counted()
    (_, start), *_ = it.events()
    for usage in (it.whole()["usage"], it.streamed()["usage"], start["message"]["usage"]):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (prompt - 5, 5)


@pytest.mark.parametrize(
    ("says", "stop", "text", "which"),
    [
        (SAID, ["fox", "brown"], "The quick ", "brown"),
        (SAID, ["qui", "quick"], "The ", "qui"),
        (SAID, ["cat"], SAID, None),
        (SAID, [], SAID, None),
    ],
)
def test_the_stop_sequence_that_ended_an_answer_is_named(
    ask: Make, says: str, stop: list[str], text: str, which: str | None
) -> None:
    it = ask()
    it.engine.says = says
    message = alike(it, stop_sequences=stop)
    assert message["content"] == [{"type": "text", "text": text}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence" if which else "end_turn", which)


def test_an_answer_of_max_tokens(ask: Make) -> None:
    it = ask()
    message = alike(it, max_tokens=3)
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 3)


def test_an_answer_for_which_the_context_may_have_no_room_is_cut_there(ask: Make) -> None:
    """Claude Code asks for as much as Anthropic's models can say, whatever model is behind the API."""
    it = ask()
    prompt = it.counted()
    assert alike(it, max_tokens=64_000)["stop_reason"] == "end_turn"
    assert it.engine.requests[-1].sampling.max_tokens == 4096 - prompt
    it.engine.says = "word " * 4096
    assert alike(it, max_tokens=64_000)["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize("says", ["", "\n \n"])
def test_an_answer_of_nothing_has_no_blocks(ask: Make, says: str) -> None:
    it = ask()
    it.engine.says = says
    message = alike(it)
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")


def test_sampling_parameters_reach_the_engine(ask: Make) -> None:
    it = ask()
    it.whole(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a"], seed=3, priority=2, cache_salt="s")
    request = it.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0.5, 0.9, 7, ("a",))
    assert (sampling.seed, request.priority) == (3, 2)
    it.whole(top_k=0, temperature=None, stop_sequences=None)
    assert it.engine.requests[-1].sampling.stop == ()


def test_an_answers_schema_is_passed_on_or_refused(ask: Make) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema}
    it = ask()
    for change in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        it.whole(**change)
        grammar = it.engine.requests[-1].sampling.grammar
        assert grammar is not None and '"integer"' in str(grammar)
    large = {"format": {**form, "schema": {"enum": ["x" * 70_000]}}}
    assert "output_config.format.schema has 70" in it.refused(output_config=large)


def test_labels_that_clients_put_on_requests_change_nothing(ask: Make) -> None:
    labels: dict[str, Any] = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": []}, "anthropic_beta": ["x"], "inference_geo": "eu", "container": None,
        "mcp_servers": [], "thinking": {"type": "enabled", "budget_tokens": 1024},
    }  # fmt: skip
    it = ask()
    response = it.post(**labels)
    assert response.status_code == 200 and "x-raydix-ignored-fields" not in response.headers
    assert it.post(novelty=1).headers["x-raydix-ignored-fields"] == "novelty"
    plain, labelled = it.engine.requests[-1], it.engine.requests[-2]
    assert plain.prompt_ids == labelled.prompt_ids


def test_timings_can_be_asked_for(ask: Make) -> None:
    it = ask()
    assert it.whole(include_timings=True)["timings"]["total_s"] >= 0
    changed = next(event for name, event in it.events(include_timings=True) if name == "message_delta")
    assert changed["timings"]["total_s"] >= 0


def test_every_answer_has_the_requests_id_where_clients_look_for_it(ask: Make) -> None:
    it = ask()
    for response in (it.post(), it.post(stream=True), it.post(f"{MESSAGES}/count_tokens")):
        assert response.status_code == 200
        assert response.headers["request-id"] == response.headers["x-request-id"]


def test_a_stream_that_fails_ends_with_an_error_of_anthropics_form(ask: Make) -> None:
    it = ask(HERMES)
    it.engine.fail_after = (3, ReplicaLost("replica-1", "it is gone"))
    response = it.post(stream=True)
    *_, (name, event) = events_of(response.text)
    assert (name, event["error"]["type"]) == ("error", "overloaded_error")
    assert event["request_id"] == response.headers["request-id"] and "engine" in event["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_in_a_grammar_has_anthropics_form(ask: Make, stream: bool) -> None:
    it = ask(HERMES)
    end = StreamDelta("x", finish_reason="error", error="none after 'a'", error_code="grammar_dead_end")
    it.engine.fail_after = (3, end)
    response = it.post(stream=stream)
    assert response.status_code == (200 if stream else 400)
    error = events_of(response.text)[-1][1]["error"] if stream else response.json()["error"]
    assert error["type"] == "invalid_request_error" and "none after 'a'" in error["message"]


def test_requests_are_counted_and_measured_as_messages(ask: Make) -> None:
    it = ask()
    it.whole()
    it.post(max_tokens=...)
    values: Any = snapshot_of(it.talk.metrics).values
    for name, label in (
        ("requests_total", "messages"),
        ("request_errors_total", "messages"),
        ("http_requests_total", MESSAGES),
    ):
        assert sum(value for labels, value in values[name] if label in labels) > 0, name
