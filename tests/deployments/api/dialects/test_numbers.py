"""Numbers in arguments keep their text, from a model's answer to the client, and from the client to the prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.api.base import exact_json
from deployments.api.dialects.formats import FORMATS
from tests.deployments.api.dialects.conftest import ASK, Talk
from tests.deployments.support.chat_templates import FAMILIES, HERMES
from tests.deployments.support.tool_answers import NUMBERS
from tests.support.examples import examples

Make = Callable[..., Talk]
SCHEMA = {"type": "object", "properties": {"count": {"type": "integer"}, "of": {"type": "array"}}}
FIND = {"name": "find", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FIND}
ARGUMENTS = [f'{{"count": {number}, "of": [{{"a": {number}}}]}}' for number in NUMBERS]
USER = ASK["messages"][0]


def squeezed(text: str) -> str:
    return text.replace(" ", "")


def as_message(it: Talk) -> Any:
    """Return what Messages answers with what the engine says."""
    tools = [{"name": "find", "input_schema": SCHEMA}]
    asked = {"model": ASK["model"], "max_tokens": 2000, "messages": [USER], "tools": tools}
    return it.client.post("/v1/messages", asked, headers={"anthropic-version": "2023-06-01"})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_has_the_numbers_that_the_model_wrote_and_so_has_the_next_prompt(talk: Make, name: str) -> None:
    it = talk(FAMILIES[name], reasoning="none")
    for arguments, number in zip(ARGUMENTS, NUMBERS, strict=True):
        it.engine.says = said = FORMATS[name].spell_all([("find", arguments)])
        assert squeezed(said).count(number) == 2
        for answer in (it.whole(tools=[TOOL]), it.streamed(tools=[TOOL])):
            message = answer.choices[0].message
            assert squeezed(message.tool_calls[0].function.arguments) == squeezed(arguments)
        it.whole(tools=[TOOL], messages=[USER, message, {"role": "tool", "tool_call_id": "c", "content": "?"}])
        assert it.prompt().count(number) == 2


def test_so_have_prompts_of_templates_without_a_place_for_calls(talk: Make) -> None:
    for template in (None, HERMES.replace("message.tool_calls", "none")):
        it = talk(template)
        for arguments in ARGUMENTS:
            call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": arguments}}
            it.whole(tools=[TOOL], messages=[USER, {"role": "assistant", "tool_calls": [call]}])
            assert arguments in it.prompt()


def test_anthropics_objects_and_the_texts_of_responses_have_them_too(talk: Make) -> None:
    it = talk(HERMES)
    for arguments in ARGUMENTS:
        it.engine.says = FORMATS["hermes"].spell_all([("find", arguments)])
        assert f'"input":{squeezed(arguments)}' in as_message(it).text
        body = {"model": ASK["model"], "input": "?", "tools": [{"type": "function", **FIND}]}
        (call,) = it.client.post("/v1/responses", body).json()["output"]
        assert call["arguments"] == arguments


def test_an_input_that_was_cut_off_has_its_numbers(talk: Make) -> None:
    it = talk(HERMES)
    it.engine.says = '<tool_call>{"name": "find", "arguments": {"count": 0.10, "of": [1E5, "-0", -0, 1e400, "Os'
    answer = as_message(it)
    assert '"input":{"count":0.10,"of":[1E5,"-0",-0,1e400,"Os"]}' in answer.text


def test_an_input_with_line_breaks_in_a_text_has_the_text(talk: Make) -> None:
    it = talk(HERMES)
    it.engine.says = '<tool_call>{"name": "find", "arguments": {"of": "a\n\tb"}}</tool_call>'
    answer = as_message(it)
    assert answer.json()["content"][0]["input"] == {"of": "a\n\tb"}


@pytest.mark.parametrize(
    "text", ["0x10", "1_000", "+3", "007", "1 5", "NaN", "Infinity", ".5", "5.", "--1", "1e", "²"]
)
@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "minimax", "glm", "glm47", "gemma4"])
def test_an_argument_that_is_no_json_number_stays_a_text(talk: Make, name: str, text: str) -> None:
    it = talk(FAMILIES[name], reasoning="none")
    it.engine.says = FORMATS[name].spell_all([("find", '{"count": 42.0}')]).replace("42.0", text)
    call = it.whole(tools=[TOOL]).choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"count": text}


def test_templates_show_a_written_number_as_one(talk: Make) -> None:
    shows = (
        "{% for call in messages[-1].tool_calls %}{% for key, value in call.function.arguments | items %}"
        "{{ value }} {{ value is number }} {{ value is string }} {{ value | float > 0 }} {{ value | tojson }};"
        "{% endfor %}{% endfor %}"
    )
    it = talk("{# tools tool_calls <tool_call> 'arguments' #}" + shows)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1E5, "b": 0.10}'}}
    it.whole(messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    assert it.prompt() == "1E5 True False True 1E5;0.10 True False True 0.10;"


@pytest.mark.parametrize("text", ['{"a":1,}', '{"a":1 "b":2}', '{"a":NaN}', r'{"a":"\x"}'])
def test_an_input_that_is_no_json_is_given_as_the_model_wrote_it(talk: Make, text: str) -> None:
    """Messages has objects only: a client that gets {} could not know that the model wrote anything."""
    it = talk(HERMES)
    it.engine.says = f'<tool_call>{{"name": "find", "arguments": {text}}}</tool_call>'
    answer = as_message(it)
    assert answer.json()["content"][0]["input"] == {"arguments": text}


written = st.recursive(
    st.sampled_from([*NUMBERS, "true", "null"]) | st.text().map(json.dumps),
    lambda one: (
        st.lists(one, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
        | st.dictionaries(st.text().map(json.dumps), one, max_size=3).map(
            lambda parts: "{" + ",".join(f"{key}:{value}" for key, value in parts.items()) + "}"
        )
    ),
)


@settings(max_examples=examples(100))
@given(text=written)
def test_json_is_written_as_it_was_read(text: str) -> None:
    assert exact_json.write(exact_json.parse(text), separators=(",", ":")) == text


@settings(max_examples=examples(100))
@given(text=written.filter(lambda text: text[0] in '{["'), end=st.integers(0, 100))
def test_the_beginning_of_json_is_closed(text: str, end: int) -> None:
    whole, part = exact_json.closed(text), text[: max(end % (len(text) + 1), 1)]
    assert exact_json.write(exact_json.parse(whole), separators=(",", ":")) == text
    assert exact_json.closed(part)[0] == text[0]
