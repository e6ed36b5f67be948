"""`functions` and `function_call`: OpenAI's form of tools before 2023's end, answered in that form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.deployments.api.dialects.conftest import ASK, CLOCK, TOOLS, WEATHER, Talk
from tests.deployments.support.chat_templates import HERMES, LLAMA3

Make = Callable[..., Talk]
FUNCTIONS = [tool["function"] for tool in TOOLS]
ARGUMENTS = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_call_is_answered_in_the_older_form(talk: Make, chunk: int) -> None:
    it = talk(HERMES)
    it.engine.chunk, it.engine.says = chunk, f"I look.{CALL}{CALL}"
    choice = it.whole(functions=FUNCTIONS).choices[0]
    message = choice.message.to_dict()
    assert message["function_call"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert "tool_calls" not in message and message["content"] == "I look."
    assert choice.finish_reason == "function_call"

    deltas = [choice for chunk in it.chunks(functions=FUNCTIONS) for choice in chunk.to_dict()["choices"]]
    calls = [delta["delta"]["function_call"] for delta in deltas if "function_call" in delta["delta"]]
    assert calls[0]["name"] == "get_weather" and not any("name" in call for call in calls[1:])
    assert "".join(call["arguments"] for call in calls) == ARGUMENTS  # one call, and no other
    assert deltas[-1]["finish_reason"] == "function_call"
    assert not any("tool_calls" in delta["delta"] for delta in deltas)


def test_an_answer_without_a_call_is_as_ever(talk: Make) -> None:
    choice = talk(HERMES).whole(functions=FUNCTIONS, function_call="auto").choices[0]
    assert choice.finish_reason == "stop" and choice.message.function_call is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {}),
        ({"function_call": "auto"}, {"tool_choice": "auto"}),
        ({"function_call": "none"}, {"tool_choice": "none"}),
        ({"function_call": {"name": "clock"}}, {"tool_choice": NAMED}),
    ],
)
def test_prompts_and_grammars_are_those_of_tools(talk: Make, old: dict[str, Any], new: dict[str, Any]) -> None:
    it = talk(HERMES)
    it.whole(functions=FUNCTIONS, **old)
    it.whole(tools=TOOLS, parallel_tool_calls=False, **new)
    ours, theirs = it.engine.requests
    assert ours.prompt_ids == theirs.prompt_ids
    assert ours.sampling.grammar == theirs.sampling.grammar


def test_values_without_effect_are_accepted_with_tools_and_without(talk: Make) -> None:
    it = talk(HERMES)
    for fields in ({"function_call": "none"}, {"function_call": "auto", "functions": []}, {"functions": None}):
        it.whole(**fields)
    it.whole(functions=[], function_call=None, tools=TOOLS)
    it.engine.says = CALL
    assert it.whole(functions=[], tools=TOOLS).choices[0].message.tool_calls


@pytest.mark.parametrize("template", [HERMES, LLAMA3, None])
def test_a_conversation_is_sent_back_unchanged(talk: Make, template: str | None) -> None:
    """A result names the function, and not the call: it answers the function's last call."""
    called = {"name": "get_weather", "arguments": ARGUMENTS}
    old = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "get_weather", "content": "It rains."},
        {"role": "assistant", "content": "", "function_call": called},
        {"role": "function", "name": "get_weather", "content": "It snows."},
    ]
    it = talk(template)
    it.engine.says = "It snows."
    answer = it.client.post("/v1/chat/completions", ASK | {"messages": old, "functions": FUNCTIONS})
    assert answer.status_code == 200 and "x-raydix-ignored-fields" not in answer.headers
    ours = it.prompt()
    new: list[dict[str, Any]] = []
    for message in old:
        if message["role"] == "assistant":
            call = {"id": f"call_{len(new)}", "type": "function", "function": called}
            message = {"role": "assistant", "content": message["content"], "tool_calls": [call]}
        elif message["role"] == "function":
            call_id = new[-1]["tool_calls"][0]["id"]
            message = {"role": "tool", "tool_call_id": call_id, "content": message["content"]}
        new.append(message)
    it.whole(messages=new, tools=[WEATHER, CLOCK])
    assert it.prompt() == ours
