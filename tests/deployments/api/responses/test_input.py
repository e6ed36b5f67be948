"""`input`: what the model reads of it, what is refused, and that what this server has sent is taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.api import Limits
from tests.deployments.api.responses.conftest import ASK, CLOCK, WEATHER, Responses
from tests.deployments.support.chat_templates import HERMES, THINKING
from tests.support.examples import examples

Make = Callable[..., Responses]
CALL = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "Oslo"}'}
CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Is it raining?"}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("Is it raining?", [USER]),
        ([USER], [USER]),
        ([{"type": "message", **USER}], [USER]),
        ([{"role": "user", "content": [{"type": "input_text", "text": "Is it raining?"}]}], [USER]),
        ([SYSTEM | {"role": "developer"}, USER], [SYSTEM, USER]),
        (
            [USER, {"role": "assistant", "content": [{"type": "output_text", "text": "No.", "annotations": []}]},
             USER],
            [USER, {"role": "assistant", "content": "No."}, USER],
        ),
        (
            [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER],
            [USER, {"role": "assistant", "content": "No."}, USER],
        ),
        (
            [USER, CALL, CALL | {"call_id": "d"}, {"type": "function_call_output", "call_id": "c", "output": "no"},
             {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "yes"}]}],
            [USER, {"role": "assistant", "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "d"}]},
             {"role": "tool", "tool_call_id": "c", "content": "no"},
             {"role": "tool", "tool_call_id": "d", "content": "yes"}],
        ),
        (
            [USER, {"type": "reasoning", "id": "rs_1", "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm."}]},
             {"type": "message", "role": "assistant", "content": "I look."}, CALL,
             {"type": "function_call_output", "call_id": "c", "output": None}, USER],
            [USER, {"role": "assistant", "reasoning": "Hm.", "content": "I look.", "tool_calls": [CHAT_CALL]},
             {"role": "tool", "tool_call_id": "c", "content": ""}, USER],
        ),
        (
            [USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "content": None,
                    "encrypted_content": "x"}, {"role": "assistant", "content": "No."}, USER],
            [USER, {"role": "assistant", "reasoning": "Hm.", "content": "No."}, USER],
        ),
        (
            [USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, USER],
            [USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, USER],
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("template", [None, HERMES, THINKING])
def test_the_prompt_is_that_of_the_chat_with_the_same_content(
    ask: Make, template: str | None, given: Any, messages: list[Any]
) -> None:
    it = ask(template)
    it.whole(input=given, tools=[WEATHER])
    tool = {"type": "function", "function": {name: value for name, value in WEATHER.items() if name != "type"}}
    it.talk.whole(messages=messages, tools=[tool])
    ours, chats = it.engine.requests[-2:]
    assert ours.prompt_ids == chats.prompt_ids


def test_instructions_come_first(ask: Make) -> None:
    it = ask()
    it.whole(instructions="Be brief.")
    ours = it.engine.requests[-1].prompt_ids
    it.talk.whole(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK["input"]}])
    assert it.engine.requests[-1].prompt_ids == ours


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": []}, "input", "at least one item"),
        ({"input": 5}, "input", "a text or an array"),
        ({"input": [5]}, "input.0", "an object"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input", "is empty"),
        ({"input": [{"type": "web_search_call"}, {"role": "wizard"}]}, "input.1.role", "must be one of"),
        ({"input": [{"role": "wizard", "content": "a"}]}, "input.0.role", "must be one of"),
        ({"input": [USER, {"role": "user"}]}, "input.1.content", "a string or a non-empty array"),
        ({"input": [USER, {"type": "function_call", "name": "f"}]}, "input.1.call_id", "required"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "input.0.output", "string"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.id", "no stored response"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "cannot run"),
        ({"tools": [{"type": "web_search"}, {"type": "namespace", "name": "a", "tools": [WEATHER, WEATHER]}]},
         "tools.1.tools.1.name", "names must differ"),
        ({"tools": [{"type": "namespace", "name": "a b", "tools": [CLOCK]}]}, "tools.0.tools.0.name", "letters"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools.0.tools", "is required"),
        ({"tools": [{"type": "custom"}]}, "tools.0.name", "is required"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "web_search"}]}}, "tool_choice.tools", "cannot run"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "namespace", "name": "g"}]}}, "tool_choice.tools.0.name", "not a namespace"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name", "is required"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.name", "names must differ"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "not among"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "g"}]}}, "tool_choice.tools", "not among tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "required"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format", "yaml"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "must be one of"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "must be one of"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"include": ["everything"]}, "include", "everything"),
        ({"max_output_tokens": 0}, "max_output_tokens", "[1,"),
        ({"max_output_tokens": 10**6}, "input", "maximum context length"),
        ({"background": True, "store": False}, "background", "store"),
        ({"previous_response_id": "resp_" + "0" * 32}, "previous_response_id", "responses.ttl_s"),
        ({"previous_response_id": "../../etc/passwd"}, "previous_response_id", "responses.ttl_s"),
        ({"top_logprobs": 100}, "top_logprobs", "limits.max_top_logprobs"),
    ],
)  # fmt: skip
def test_a_refused_field_is_named_as_the_client_knows_it(
    ask: Make, change: dict[str, Any], param: str, words: str
) -> None:
    error = ask(HERMES).refused(**change)
    assert error["param"] == param and words in error["message"], error
    assert "messages" not in error["message"] and "response_format" not in error["message"]


def test_limits_are_named(ask: Make) -> None:
    it = ask(limits=Limits(max_messages=2, max_content_parts=1))
    assert "limits.max_messages" in it.refused(input=[USER] * 3)["message"]
    parts = [{"type": "input_text", "text": "a"}] * 2
    assert "limits.max_content_parts" in it.refused(input=[{"role": "user", "content": parts}])["message"]
    first = it.whole(input=[USER])
    assert "limits.max_messages" in it.refused(input=[USER], previous_response_id=first["id"])["message"]


words = st.text(st.sampled_from("ab é\n{}<>"), max_size=12)
thoughts = st.one_of(st.just(""), words.map(lambda text: f"<think>\n{text}\n</think>\n\n"))
calls = st.sampled_from(
    [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"ci',
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
    ]
)
answers = st.tuples(thoughts, st.lists(words | calls, max_size=4)).map(lambda parts: parts[0] + "".join(parts[1]))


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(answers, st.integers(1, 40), st.booleans())
def test_output_of_this_server_is_accepted_as_input(ask: Make, answer: str, most: int, stream: bool) -> None:
    """Sent back item by item, or named by the response's id, it gives the same prompt."""
    it = ask(HERMES, reasoning="think")
    it.engine.says = answer
    asked: dict[str, Any] = {"tools": [WEATHER], "max_output_tokens": most, "input": [USER]}
    response = it.events(**asked)[-1]["response"] if stream else it.whole(**asked)
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "no"}
        for item in response["output"]
        if item["type"] == "function_call"
    ]
    asked["max_output_tokens"] = 5
    it.whole(**asked | {"input": [USER, *response["output"], *results, USER]})
    whole = it.engine.requests[-1].prompt_ids
    it.whole(**asked | {"input": [*results, USER]}, previous_response_id=response["id"])
    assert it.engine.requests[-1].prompt_ids == whole
    named = [{"type": "item_reference", "id": item["id"]} for item in response["output"]]
    it.whole(**asked | {"input": [USER, *named, *results, USER]})
    assert it.engine.requests[-1].prompt_ids == whole


def test_the_oldest_turns_are_left_out_where_the_client_lets_them(ask: Make) -> None:
    it = ask()
    turns = [
        {"role": role, "content": f"{at} " + "word " * 200} for at in range(20) for role in ("user", "assistant")
    ]
    asked: dict[str, Any] = {"input": [SYSTEM, *turns, USER], "max_output_tokens": 20}
    assert it.refused(**asked)["code"] == "context_length_exceeded"
    assert it.whole(**asked, truncation="auto")["truncation"] == "auto"
    prompt = it.talk.prompt()
    assert (
        "Be brief." in prompt and "Is it raining?" in prompt and "19 word" in prompt and "\n0 word" not in prompt
    )
    assert len(it.engine.requests[-1].prompt_ids) > 3000, "as few as possible"


def test_a_template_gets_the_effort_and_the_verbosity(ask: Make) -> None:
    it = ask("{{ reasoning_effort }} {{ verbosity }} {{ messages[0].content }}")
    it.whole(reasoning={"effort": "low"}, text={"verbosity": "high"})
    assert it.talk.prompt().startswith("low high")
