"""Numbers in what a client sends reach the prompt with the client's text, through each API and in each form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from deployments.api.base import exact_json
from deployments.api.dialects.formats import FORMATS
from tests.deployments.api.dialects.conftest import ASK, Talk
from tests.deployments.support.chat_templates import FAMILIES, HERMES, LLAMA3
from tests.deployments.support.tool_answers import NUMBERS

Make = Callable[..., Talk]
TEMPLATES = {**FAMILIES, "hermes": HERMES, "llama3": LLAMA3}
OF_JSON = [name for name in TEMPLATES if FORMATS[name].rules is None]
"""Formats in which arguments are JSON."""
NAME_CALLS = ("kimi", "mistral_list")
"""Formats in which a call has its id, which OpenAI's older form of a call has not."""
MODEL, QUESTION = ASK["model"], ASK["messages"][0]
FIND = {"name": "find", "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"type": "function", "function": FIND}],
    "/v1/messages": [{"name": "find", "input_schema": FIND["parameters"]}],
    "/v1/responses": [{"type": "function", **FIND}],
}
FORCED: dict[str, Any] = {
    "/v1/chat/completions": "required",
    "/v1/messages": {"type": "any"},
    "/v1/responses": "required",
}
ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({}, "messages"),
    "/v1/messages": ({"max_tokens": 2000}, "messages"),
    "/v1/responses": ({}, "input"),
}
COUNTED = {
    "/v1/chat/completions": ("/tokenize", "count"),
    "/v1/messages": ("/v1/messages/count_tokens", "input_tokens"),
    "/v1/responses": ("/v1/responses/input_tokens", "input_tokens"),
}
ODD = (*NUMBERS, "1e-05", "1e+16", "1e16", "0.00001", "-0.10", "1.0e0", "-" + "9" * 300, "0E0")
"""Numbers that some writer of JSON writes in another way, or not at all."""


def conversation(path: str, *items: Any) -> dict[str, Any]:
    fields, field = ASKED[path]
    return {"model": MODEL, "tools": TOOLS[path], **fields, field: [QUESTION, *items]}


def calls(name: str, arguments: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield each form in which a call is sent back: the path, and what follows the question."""
    value, chat = exact_json.parse(arguments), "/v1/chat/completions"
    result = {"role": "tool", "tool_call_id": name, "content": "!"}
    for given in (arguments, value):
        function = {"name": "find", "arguments": given}
        call = {"id": name, "type": "function", "function": function}
        yield chat, [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
        of_old_form = {"role": "assistant", "content": None, "function_call": function}
        yield chat, [of_old_form, {"role": "function", "name": "find", "content": "!"}]
    use = {"type": "tool_use", "id": name, "name": "find", "input": value}
    returned = {"type": "tool_result", "tool_use_id": name, "content": "!"}
    yield "/v1/messages", [{"role": "assistant", "content": [use]}, {"role": "user", "content": [returned]}]
    item = {"type": "function_call", "call_id": name, "name": "find", "arguments": arguments}
    yield "/v1/responses", [item, {"type": "function_call_output", "call_id": name, "output": "!"}]


def post(it: Talk, path: str, body: Mapping[str, Any]) -> Any:
    """Post a body with its numbers as they are written."""
    headers = {"anthropic-version": "2023-06-01", "content-type": "application/json"}
    response = it.client.post(path, exact_json.encode(body), headers=headers)
    assert response.status_code == 200, response.text
    return response


def prompt_ids(it: Talk) -> list[int]:
    return list(it.engine.requests[-1].prompt_ids)


@pytest.mark.parametrize("name", OF_JSON)
def test_a_call_that_is_sent_back_has_the_tokens_of_the_models_answer(talk: Make, name: str) -> None:
    """So that the KV of the answer is found again."""
    it = talk(TEMPLATES[name], reasoning="none")
    arguments = f'{{"count": [{", ".join(ODD)}], "by": {{"a": {ODD[0]}}}}}'
    call_id = "functions.find:0" if name == "kimi" else "abcdefghi"
    it.engine.says = said = answer_of(it, arguments, call_id)
    for path, items in calls(call_id, arguments):
        if name in NAME_CALLS and "function_call" in items[0]:
            continue
        answer = post(it, path, conversation(path)).text
        assert arguments.replace(" ", "") in answer.replace(" ", "").replace("\\", "")
        asked = prompt_ids(it)
        post(it, path, conversation(path, *items))
        again = [*asked, *it.engine.codec.encode(said, add_special_tokens=False)]
        assert prompt_ids(it)[: len(again)] == again


def shown(it: Talk, path: str, **fields: Any) -> str:
    """Return the prompt of a question with further fields."""
    post(it, path, conversation(path) | fields)
    return it.prompt()


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_have_their_numbers_in_every_format(talk: Make, name: str) -> None:
    it = talk(TEMPLATES[name], reasoning="none")
    for number in ODD:
        arguments = f'{{"count": {number}, "of": [{{"a": {number}}}]}}'
        for path, items in calls("abcdefghi", arguments):
            post(it, path, conversation(path, *items))
            assert it.prompt().count(number) >= 2, (path, number)


@pytest.mark.parametrize("template", [None, HERMES.replace("message.tool_calls", "none")])
def test_so_have_they_where_templates_have_no_place_for_calls(talk: Make, template: str | None) -> None:
    it = talk(template)
    for number in ODD:
        for path, items in calls("abcdefghi", f'{{"count": {number}}}'):
            post(it, path, conversation(path, *items))
            assert number in it.prompt()


def test_the_arguments_of_a_custom_tool_are_no_exception(talk: Make) -> None:
    it = talk(HERMES)
    for number in ODD:
        given = exact_json.parse(f'{{"a": {number}}}')
        call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": given}}
        shown(it, "/v1/chat/completions", messages=[QUESTION, {"role": "assistant", "tool_calls": [call]}])
        assert f'{{"input": {{"a": {number}}}}}' in it.prompt()


def test_documents_are_shown_with_the_numbers_that_the_client_wrote(talk: Make) -> None:
    it = talk("{% for document in documents %}{{ document.a }} {{ document | tojson }}{% endfor %}")
    for number in ODD:
        if number != "1e400":
            body = {"model": MODEL, "messages": [QUESTION], "documents": [exact_json.parse(f'{{"a": {number}}}')]}
            post(it, "/v1/chat/completions", body)
            assert it.prompt() == f'{number} {{"a": {number}}}'


def test_arguments_in_which_a_name_stands_twice_are_shown_as_they_are(talk: Make) -> None:
    for template in (None, HERMES):
        it = talk(template)
        for arguments in ('{"a": 1, "a": 2}', '{"b": [{"a": 1, "a": 1}]}'):
            call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": arguments}}
            shown(it, "/v1/chat/completions", messages=[QUESTION, {"role": "assistant", "tool_calls": [call]}])
            assert arguments in it.prompt().replace("\\", "")


@pytest.mark.parametrize("template", [None, HERMES, LLAMA3])
@pytest.mark.parametrize("path", TOOLS)
def test_schemas_of_tools_are_shown_with_the_numbers_that_the_client_wrote(
    talk: Make, path: str, template: str | None
) -> None:
    it = talk(template)
    for number in ODD:
        if number != "1e400":
            schema = exact_json.parse(f'{{"properties": {{"a": {{"enum": [{number}], "default": {number}}}}}}}')
            assert shown(it, path, tools=with_schema(path, schema)).count(number) == 2


@pytest.mark.parametrize("path", TOOLS)
def test_an_answer_is_held_to_a_schema_by_the_values_of_its_numbers(talk: Make, path: str) -> None:
    it = talk(HERMES)
    schema = exact_json.parse('{"properties": {"a": {"enum": [1E1, -0, 0.50], "maximum": 1E2}}}')
    post(it, path, conversation(path) | {"tools": with_schema(path, schema), "tool_choice": FORCED[path]})
    grammar = it.engine.requests[-1].sampling.grammar
    assert grammar is not None and '{"enum": [10.0, 0, 0.5], "maximum": 100.0}' in grammar.source


@pytest.mark.parametrize("path", TOOLS)
def test_a_schema_with_a_number_that_is_too_large_is_refused_by_its_name(talk: Make, path: str) -> None:
    it = talk(HERMES)
    tools = with_schema(path, exact_json.parse('{"properties": {"a": {"maximum": 1e400}}}'))
    headers = {"content-type": "application/json"}
    answer = it.client.post(path, exact_json.encode(conversation(path) | {"tools": tools}), headers=headers)
    assert answer.status_code == 400 and "properties.a.maximum is 1e400" in answer.json()["error"]["message"]


def test_a_response_repeats_its_tools_with_the_numbers_that_the_client_wrote(talk: Make) -> None:
    path, schema = "/v1/responses", exact_json.parse('{"properties": {"a": {"enum": [1E1, -0, 0.50]}}}')
    answer = post(talk(HERMES), path, conversation(path) | {"tools": with_schema(path, schema)})
    assert '{"enum":[1E1,-0,0.50]}' in answer.text


def with_schema(path: str, schema: Any) -> list[Any]:
    """Return the tool of a path with another schema."""
    (tool,) = TOOLS[path]
    if path == "/v1/messages":
        return [tool | {"input_schema": schema}]
    if path == "/v1/responses":
        return [tool | {"parameters": schema}]
    return [tool | {"function": FIND | {"parameters": schema}}]


def test_counting_counts_the_tokens_of_the_numbers_as_they_are_written(talk: Make) -> None:
    it = talk(HERMES)
    for path, items in calls("c", f'{{"count": [{", ".join(ODD)}]}}'):
        asked = conversation(path, *items)
        post(it, path, asked)
        url, field = COUNTED[path]
        assert post(it, url, asked).json()[field] == len(prompt_ids(it))


def answer_of(it: Talk, arguments: str, call_id: str) -> str:
    """Return how the model writes a call, which is how its template does."""
    path, items = next(calls(call_id, arguments))
    post(it, path, conversation(path))
    question = it.prompt()
    post(it, path, conversation(path, *items))
    said, end, _ = it.prompt().removeprefix(question).partition("<|im_end|>")
    assert said != it.prompt() and end
    return said
