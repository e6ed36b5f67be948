"""Tools by Anthropic's API: what models are told of them, and how their calls come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.deployments.api.anthropic.conftest import ASK, CLOCK, WEATHER, Messages, alike
from tests.deployments.support.chat_templates import HERMES, LLAMA3

Make = Callable[..., Messages]
TOOLS = [WEATHER, CLOCK]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("template", [None, HERMES])
def test_text_and_calls_are_blocks(ask: Make, template: str | None, chunk: int) -> None:
    it = ask(template)
    it.engine.chunk = chunk
    it.engine.says = f'I look.\n{call("get_weather", """{"city": "Oslo"}""")}\n{call("clock", "{}")}'
    message = alike(it, tools=TOOLS)
    assert message["content"] == [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "name": "clock", "input": {}},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_blocks_come_in_the_order_in_which_the_model_writes_them(ask: Make, chunk: int) -> None:
    it = ask(HERMES)
    it.engine.chunk = chunk
    late, rain = call("clock", '{"zone": "utc"}'), call("get_weather", '{"city": "Oslo"}')
    it.engine.says = f"First {late} It is late. {rain} It rains. {late}{late}"
    content = alike(it, tools=TOOLS)["content"]
    assert [block["name"] if "name" in block else block["text"].strip() for block in content] == [
        "First", "clock", "It is late.", "get_weather", "It rains.", "clock", "clock",
    ]  # fmt: skip


def test_a_call_that_is_cut_off_has_the_input_so_far(ask: Make) -> None:
    it = ask(HERMES)
    it.engine.says = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo", "day": "Mon'
    message = it.whole(tools=TOOLS)
    assert message["content"][0]["input"] == {"city": "Oslo", "day": "Mon"}
    assert message["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("arguments", "is_kept"),
    [
        ('{"city": "Oslo", "city": "Bergen"}', True), ('{"city": [{"a": 1, "a": 2}]}', True),
        ('{"city": "Oslo", "city": "Ber', True), ('{"city": "Oslo", "city": ', True),
        ('{"city": "a", "city', False),
        ('{"city": "a: b", "day": ', False), ('{"city": {"a": 1}, "day": {"a": tr', False),
    ],
)  # fmt: skip
def test_a_call_that_names_an_argument_twice_has_its_input_as_it_was_written(
    ask: Make, arguments: str, is_kept: bool
) -> None:
    it = ask(HERMES)
    it.engine.says = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}'
    given = it.whole(tools=TOOLS)["content"][0]["input"]
    assert (given == {"arguments": arguments}) is is_kept


def test_disable_parallel_tool_use_allows_only_one_call(ask: Make) -> None:
    it = ask(HERMES)
    it.engine.says = call("clock", "{}") + call("clock", "{}")
    for change, count in (({}, 2), ({"disable_parallel_tool_use": True}, 1)):
        message = alike(it, tools=TOOLS, tool_choice={"type": "auto", **change})
        assert (len(message["content"]), message["stop_reason"]) == (count, "tool_use")


@pytest.mark.parametrize(
    ("choice", "is_shown", "is_forced"),
    [
        (None, True, False),
        ({"type": "auto"}, True, False),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "clock"}, True, True),
        ({"type": "none"}, False, False),
    ],
)
def test_whether_a_tool_must_be_used(ask: Make, choice: Any, is_shown: bool, is_forced: bool) -> None:
    it = ask(HERMES)
    it.whole(tools=TOOLS, tool_choice=choice)
    grammar = it.engine.requests[-1].sampling.grammar
    assert ("get_weather" in it.talk.prompt()) == is_shown
    assert (grammar is not None) == is_forced
    if choice and choice["type"] == "tool":
        assert "clock" in str(grammar) and "get_weather" not in str(grammar)


def test_the_prompt_is_that_of_the_same_chat_completion(ask: Make) -> None:
    """Both APIs share what is cached of a conversation."""
    it = ask(HERMES)
    it.whole(
        system="Be brief.",
        tools=TOOLS,
        messages=[
            *ASK["messages"],
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Rain?", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "toolu_2", "name": "clock", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Rain."}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "Late."},
                {"type": "text", "text": "So?"}]},
        ],
    )  # fmt: skip
    theirs = it.engine.requests[-1].prompt_ids
    functions = [
        {"type": "function", "function": {
            "name": each["name"], "description": each["description"], "parameters": each["input_schema"]}}
        for each in TOOLS
    ]  # fmt: skip
    it.talk.whole(
        tools=functions,
        messages=[
            {"role": "system", "content": "Be brief."},
            *ASK["messages"],
            {"role": "assistant", "reasoning": "Rain?", "content": "I look.", "tool_calls": [
                {"id": "toolu_1", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
                {"id": "toolu_2", "function": {"name": "clock", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "Rain."},
            {"role": "tool", "tool_call_id": "toolu_2", "content": "Late."},
            {"role": "user", "content": "So?"},
        ],
    )  # fmt: skip
    assert it.engine.requests[-1].prompt_ids == theirs


def test_a_template_with_names_of_functions_in_results(ask: Make) -> None:
    it = ask(LLAMA3)
    it.whole(tools=TOOLS, messages=[
        *ASK["messages"],
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "clock", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "12:00"}]},
    ])  # fmt: skip
    assert "clock gave" in it.talk.prompt() and "12:00" in it.talk.prompt()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema is required"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name must be 1 to 128"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools.0.input_schema.type"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.name is 'get_weather'"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}},
            "tools is empty, or has only tools that this server cannot run",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}, CLOCK, CLOCK]}, "tools.2.name is 'clock'"),
        (
            {
                "tools": [{"type": "bash_20250124", "name": "bash"}, CLOCK],
                "tool_choice": {"type": "tool", "name": "bash"},
            },
            "tool_choice.name is 'bash'",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name is 'g'"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice.type must be one of auto, any"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice must be an object"),
        ({"tool_choice": {"type": "any"}}, "tools is empty"),
        ({"tools": [CLOCK] * 200}, "limits.max_tools"),
    ],
)
def test_an_error_in_tools_uses_anthropics_names(ask: Make, change: dict[str, Any], says: str) -> None:
    assert says in ask(HERMES).refused(**change)


def test_names_of_tools_may_be_as_long_as_anthropics(ask: Make) -> None:
    it = ask(HERMES)
    name = "mcp__" + "x" * 123
    it.engine.says = call(name, "{}")
    assert alike(it, tools=[{"name": name, "input_schema": {"type": "object"}}])["content"][0]["name"] == name
