"""Custom tools of chats: calls whose input is a text, as OpenAI's API has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.api.dialects.custom import InputText, as_function
from tests.deployments.api.dialects.conftest import ASK, CLOCK, WEATHER, Talk, takes
from tests.deployments.support.chat_templates import HERMES

Make = Callable[..., Talk]
PATCH = {"type": "custom", "custom": {"name": "apply_patch", "description": "Changes files."}}
TEXT = '*** Begin Patch\n+say("é\\u{1F600} 😀")\n\t*** End Patch'
ZONE = '{"zone": "utc"}'
NAMED = {"type": "custom", "custom": {"name": "apply_patch"}}


def called(arguments: str, name: str = "apply_patch") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def written(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=False)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_call_has_its_input_as_text(talk: Make, chunk: int, ascii_only: bool) -> None:
    it = talk(HERMES)
    it.engine.chunk = chunk
    arguments = json.dumps({"input": TEXT}, ensure_ascii=ascii_only)
    it.engine.says = f"I look.{called(arguments)}{called(ZONE, 'clock')}"
    choice = it.whole(tools=[PATCH, CLOCK]).choices[0]
    custom, function = choice.message.tool_calls
    assert (custom.type, custom.custom.name, custom.custom.input) == ("custom", "apply_patch", TEXT)
    assert (function.type, function.function.arguments) == ("function", ZONE)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")

    deltas = [call for chunk in it.chunks(tools=[PATCH, CLOCK]) for call in _calls(chunk) if call["index"] == 0]
    begun, *others = deltas
    assert begun["type"] == "custom" and begun["id"] and begun["custom"]["name"] == "apply_patch"
    assert all(other.keys() == {"index", "custom"} and other["custom"].keys() == {"input"} for other in others)
    assert "".join(delta["custom"]["input"] for delta in deltas) == TEXT
    assert len(others) > 10 or chunk > 1  # it comes as the model writes it


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(
    ("written", "beside"),
    [
        ('{"input": "a", "input": "b"}', '"input": "b"'),
        ('{"input": "a", "why": 1}', '"why": 1'),
        ('{"why": 1.0, "input": "a", "how": [2]}', '"why":1.0,"how":[2]'),
        ('{"input": "a" }', ""),
    ],
)
def test_output_next_to_the_input_becomes_text(talk: Make, chunk: int, written: str, beside: str) -> None:
    it = talk(HERMES)
    it.engine.chunk, it.engine.says = chunk, called(written)
    message = it.whole(tools=[PATCH, CLOCK]).choices[0].message
    assert (message.tool_calls[0].custom.input, message.content or "") == ("a", beside)
    chunks = it.chunks(tools=[PATCH, CLOCK])
    assert "".join(one["custom"].get("input", "") for chunk in chunks for one in _calls(chunk)) == "a"
    assert "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices) == beside


def _calls(chunk: Any) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = [
        call for choice in chunk.to_dict()["choices"] for call in choice["delta"].get("tool_calls", ())
    ]
    return calls


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"input": ""}', ""),
        ("{}", ""),
        ('{ "input" : "a" }', "a"),
        ('{"input": "a", "why": "b"}', "a"),
        ('{"why": "b", "input": "a"}', "a"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ('{"input": null}', '{"input": null}'),
        ('{"input": "\\ud83d"}', "\ufffd"),
    ],
)
def test_arguments_without_the_expected_input_are_not_lost(talk: Make, arguments: str, given: str) -> None:
    it = talk(HERMES)
    it.engine.says = called(arguments)
    for message in (it.whole(tools=[PATCH]).choices[0].message, None):
        if message is not None:
            assert message.tool_calls[0].custom.input == given
    deltas = [call for chunk in it.chunks(tools=[PATCH]) for call in _calls(chunk)]
    assert "".join(delta["custom"]["input"] for delta in deltas) == given


def test_a_call_that_is_cut_off_has_the_part_that_was_written(talk: Make) -> None:
    it = talk(HERMES)
    it.engine.says = called(written("*** Begin Patch and much more of it"))
    for num_tokens in range(12, 30):
        choice = it.whole(tools=[PATCH], max_tokens=num_tokens).choices[0]
        calls = choice.message.tool_calls or []
        assert choice.finish_reason == "length"
        assert all("*** Begin Patch and much more of it".startswith(call.custom.input) for call in calls)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_held_to_an_input(talk: Make, choice: Any) -> None:
    it = talk(HERMES)
    it.engine.says = called(written(TEXT))
    it.whole(tools=[PATCH], tool_choice=choice)
    grammar = it.engine.requests[-1].sampling.grammar
    assert grammar is not None
    assert takes(grammar, called('{"input": "a"}')) and not takes(grammar, called('{"other": "a"}'))


def test_allowed_tools_may_be_custom(talk: Make) -> None:
    it = talk(HERMES)
    it.engine.says = called(written("a"))
    allowed = {"mode": "required", "tools": [NAMED]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = it.whole(tools=[PATCH, CLOCK], tool_choice=choice)
    assert answer.choices[0].message.tool_calls[0].custom.input == "a"
    grammar = it.engine.requests[-1].sampling.grammar
    assert grammar is not None and not takes(grammar, called(ZONE, "clock"))


def test_the_prompt_describes_the_input(talk: Make) -> None:
    it = talk(HERMES)
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "*** Begin"'}}
    tool = {"type": "custom", "custom": {**PATCH["custom"], "format": form}}  # type: ignore[dict-item]
    response = it.client.post("/v1/chat/completions", ASK | {"tools": [tool]})
    assert response.headers["x-raydix-ignored-fields"] == "tools.0.custom.format:grammar"
    shown = it.prompt().replace('\\"', '"').replace("\\n", "\n")
    assert 'Changes files.\n\nThe input matches this grammar (lark):\nstart: "*** Begin"' in shown
    it.whole(tools=[{"type": "custom", "custom": {"name": "apply_patch", "format": {"type": "text"}}}])


def test_a_call_and_its_result_go_back(talk: Make) -> None:
    it = talk(HERMES)
    call = {"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": TEXT}}
    function = {"id": "c", "type": "function", "function": as_function({"name": "apply_patch", "input": TEXT})}
    prompts = []
    for made in (call, function):
        turn = {"role": "assistant", "content": None, "tool_calls": [made]}
        result = {"role": "tool", "tool_call_id": "c", "content": "Done."}
        it.whole(messages=[*ASK["messages"], turn, result], tools=[PATCH])
        prompts.append(it.prompt())
    assert prompts[0] == prompts[1] and "*** Begin Patch" in prompts[0] and "Done." in prompts[0]


@given(
    st.text(st.characters(exclude_categories=["Cs"])), st.booleans(), st.lists(st.integers(1, 5)), st.booleans()
)
def test_any_text_is_read_however_it_is_cut(text: str, ascii_only: bool, sizes: list[int], spaced: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only, indent=1 if spaced else None)
    reader, read = InputText(), ""
    for size in [*sizes, len(arguments)]:
        read += reader.push(arguments[:size])
        assert text.startswith(read)
        arguments = arguments[size:]
    assert read + reader.finish() == text


@given(st.text(alphabet='{}":\\u12dDinput a\n'), st.lists(st.integers(1, 5)))
def test_no_arguments_are_too_odd_to_be_read(arguments: str, sizes: list[int]) -> None:
    reader, whole = InputText(), InputText()
    read, at = "", 0
    for size in [*sizes, len(arguments)]:
        read += reader.push(arguments[at : at + size])
        at += size
    read += reader.finish()
    read.encode()
    if arguments.strip() and not arguments.lstrip().startswith("{"):
        assert read == arguments == whole.push(arguments) + whole.finish()


def test_tools_and_custom_tools_share_their_names(talk: Make) -> None:
    same = {"type": "custom", "custom": {"name": "get_weather"}}
    error = talk(HERMES).refused(tools=[WEATHER, same])
    assert error["param"] == "tools.1.custom.name" and "names must differ" in error["message"]
