"""POST /v1/responses: answers, whole and streamed, are what OpenAI's clients expect."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from deployments.api.responses.protocol import ResponsesRequest
from deployments.client.protocol import ReplicaLost
from tests.deployments.api.responses.conftest import CLOCK, WEATHER, Responses
from tests.deployments.support.chat_templates import HERMES
from tests.support.metric_values import snapshot_of

Make = Callable[..., Responses]
SAID = "The quick brown fox jumps over the lazy dog."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def without_names(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without their ids and those of calls, which are random."""
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def message(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": text}
    return {"type": "message", "status": status, "role": "assistant", "content": [part]}


def call(arguments: str, status: str = "completed") -> dict[str, Any]:
    return {"type": "function_call", "status": status, "name": "get_weather", "arguments": arguments}


def thought(text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "status": status, "summary": [], "content": content}


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_an_answer_whole_and_streamed(ask: Make, chunk: int) -> None:
    it = ask()
    it.engine.chunk, it.engine.cached = chunk, 5
    whole, last = it.whole(metadata={"a": "b"}, user="u"), it.events(metadata={"a": "b"}, user="u")[-1]["response"]
    for response in (whole, last):
        assert without_names(response["output"]) == [message(SAID)]
        assert re.fullmatch("resp_[0-9a-f]{32}", response["id"]) and response["object"] == "response"
        assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
        assert (response["metadata"], response["user"], response["store"]) == ({"a": "b"}, "u", True)
        prompt = len(it.engine.requests[-1].prompt_ids)
        generated = len(it.engine.codec.encode(SAID, add_special_tokens=False)) + 1
        assert response["usage"] == {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 5},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + generated,
        }
    assert it.streamed().output_text == SAID


def test_a_streams_events_come_in_the_documented_order(ask: Make) -> None:
    it = ask(HERMES, reasoning="think")
    it.engine.says = f"<think>\nHm, rain.\n</think>\n\nI look.\n{CALL}"
    events = it.events(tools=[WEATHER])
    kinds = [event["type"].removeprefix("response.") for event in events]
    shortened = [kind for at, kind in enumerate(kinds) if at == 0 or kind != kinds[at - 1]]
    part = ["content_part.done", "output_item.done"]
    begins = ["output_item.added", "content_part.added"]
    assert shortened == [
        "created", "in_progress",
        *begins, "reasoning_text.delta", "reasoning_text.done", *part,
        *begins, "output_text.delta", "output_text.done", *part,
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    output = events[-1]["response"]["output"]
    assert without_names(output) == [thought("Hm, rain."), message("I look."), call('{"city": "Oslo"}')]
    for kind, field, expected in (
        ("reasoning_text", "text", "Hm, rain."),
        ("output_text", "text", "I look."),
        ("function_call_arguments", "arguments", '{"city": "Oslo"}'),
    ):
        deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        (done,) = [event for event in events if event["type"] == f"response.{kind}.done"]
        assert "".join(deltas) == done[field] == expected
    for event in events[2:-1]:
        item = output[event["output_index"]]
        assert event.get("item_id", item["id"]) == item["id"]
        assert event["type"] != "response.output_item.done" or event["item"] == item


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("says", "items"),
    [
        (CALL, [call('{"city": "Oslo"}')]),
        (f"{CALL}\n{CALL}", [call('{"city": "Oslo"}')] * 2),
        (f"<think>\nHm.\n</think>\n\n{CALL}", [thought("Hm."), call('{"city": "Oslo"}')]),
        ("<think>\nHm.\n</think>\n\nYes.", [thought("Hm."), message("Yes.")]),
        ("<think>\nHm.", [thought("Hm.")]),
        ("", [message("")]),
    ],
)
def test_items_are_the_same_whole_and_streamed(ask: Make, says: str, items: list[Any], chunk: int) -> None:
    it = ask(HERMES, reasoning="think")
    it.engine.says, it.engine.chunk = says, chunk
    assert without_names(it.whole(tools=[WEATHER])["output"]) == items
    assert without_names(it.events(tools=[WEATHER])[-1]["response"]["output"]) == items
    dumped = it.streamed(tools=[WEATHER]).model_dump(mode="json")["output"]
    assert [item["type"] for item in dumped] == [item["type"] for item in items]


def test_reasoning_tokens_are_counted(ask: Make) -> None:
    it = ask(HERMES, reasoning="think")
    it.engine.says = "<think>\nHm.\n</think>\n\nYes."
    details = it.whole()["usage"]["output_tokens_details"]
    assert details["reasoning_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off_is_incomplete(ask: Make, stream: bool) -> None:
    it = ask()
    change: dict[str, Any] = {"max_output_tokens": 3}
    if stream:
        last = it.events(**change)[-1]
        assert last["type"] == "response.incomplete"
    response = last["response"] if stream else it.whole(**change)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = response["output"]
    assert item["status"] == "incomplete" and SAID.startswith(item["content"][0]["text"])


@pytest.mark.parametrize("chunk", [1, 4])
def test_log_probabilities_are_those_of_the_text(ask: Make, chunk: int) -> None:
    it = ask()
    it.engine.chunk = chunk
    change: dict[str, Any] = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    events = it.events(**change)
    (whole,) = it.whole(**change)["output"][0]["content"]
    (last,) = events[-1]["response"]["output"][0]["content"]
    streamed = [at for event in events if event["type"].endswith("text.delta") for at in event["logprobs"]]
    assert whole["logprobs"] == last["logprobs"] and streamed == whole["logprobs"][: len(streamed)]
    assert "".join(at["token"] for at in whole["logprobs"]).startswith(SAID)
    assert all(len(at["top_logprobs"]) == 2 for at in whole["logprobs"])
    assert it.whole()["output"][0]["content"][0]["logprobs"] == []


def test_a_stream_that_fails_reports_it_and_keeps_its_output(ask: Make) -> None:
    it = ask()
    it.engine.fail_after = (2, ReplicaLost("r", "gone"))
    *_, error, failed = it.events()
    assert (error["type"], error["code"]) == ("error", "engine_lost") and "engine" in error["message"]
    response = failed["response"]
    assert (failed["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"]["code"] == "server_error" and response["output"][0]["status"] == "incomplete"


def test_text_that_must_match_a_schema(ask: Make) -> None:
    it = ask()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    it.engine.says = '{"a": 1}'
    assert it.whole(text={"format": form})["text"]["format"] == form
    grammar = it.engine.requests[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "json_schema" and '"integer"' in grammar.source
    it.whole(text={"format": {"type": "json_object"}})
    grammar = it.engine.requests[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "json_object"
    it.whole(text={"format": {"type": "text"}})
    assert it.engine.requests[-1].sampling.grammar is None


def test_a_choice_among_tools(ask: Make) -> None:
    it = ask(HERMES)
    it.engine.says = CALL
    tools = [WEATHER, CLOCK]
    it.whole(tools=tools)
    shown = it.talk.prompt()
    for choice, calls in (
        ("required", True),
        ({"type": "function", "name": "get_weather"}, True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}, True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "clock"}]}, False),
    ):
        response = it.whole(tools=tools, tool_choice=choice)
        assert (response["output"][0]["type"] == "function_call") == calls, choice
        assert response["tool_choice"] == choice
        assert it.talk.prompt() == shown, "the prompt begins alike, so it is cached"
    it.whole(tools=tools, tool_choice="none")
    assert "get_weather" not in it.talk.prompt()


def test_the_engine_gets_the_parameters_of_the_request(ask: Make) -> None:
    it = ask()
    it.whole(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, stop=["x"], max_output_tokens=9, priority=2,
        cache_salt="s", prompt_cache_key="k", instructions="Be brief.",
    )  # fmt: skip
    request = it.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.seed, sampling.stop, sampling.max_tokens) == (3, ("x",), 9)
    assert (request.priority, request.salt, request.session_id) == (2, "salt:s", "k")
    assert "Be brief." in it.talk.prompt()


def test_every_field_is_repeated_or_has_its_effect(ask: Make) -> None:
    """A response object has the fields of OpenAI's."""
    it = ask()
    asked: dict[str, Any] = {
        "instructions": "Be brief.", "max_output_tokens": 50, "parallel_tool_calls": False, "temperature": 0.5,
        "top_p": 0.9, "truncation": "auto", "prompt_cache_key": "k", "safety_identifier": "s",
        "service_tier": "flex", "reasoning": {"effort": "low", "summary": "auto"}, "max_tool_calls": 3,
    }  # fmt: skip
    assert asked.keys() <= ResponsesRequest.model_fields.keys()
    assert it.whole(**asked).items() >= asked.items()


def test_responses_are_counted_as_such(ask: Make) -> None:
    it = ask()
    it.whole()
    rows = snapshot_of(it.talk.metrics).values["requests_total"]
    assert any("responses" in labels and value == 1 for labels, value in rows)
