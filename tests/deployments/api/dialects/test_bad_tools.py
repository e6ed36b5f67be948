"""Every bad request for tools has its own 400 that names the field, and never reaches an engine.

Histories with calls are taken as they are: `tests/deployments/api/dialects/test_history.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deployments.api import Limits
from tests.deployments.api.dialects.conftest import ASK, CLOCK, TOOLS, WEATHER, Talk
from tests.deployments.support.chat_templates import HERMES, LLAMA3

Make = Callable[..., Talk]


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


def schema(**fields: Any) -> dict[str, Any]:
    return {"tools": function(parameters=fields)}


def deep(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        inner = {"type": "object", "properties": {"a": inner}}
    return inner


def chat(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*ASK["messages"], *turns]}


def calls(**changes: Any) -> dict[str, Any]:
    """An assistant's turn with one call."""
    called = {"name": "f", "arguments": "{}"} | {k: v for k, v in changes.items() if k in ("name", "arguments")}
    rest = {k: v for k, v in changes.items() if k not in called}
    return {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": called, **rest}]}


RESULT = {"role": "tool", "tool_call_id": "c", "content": "1"}
PARAMETERS = "tools.0.function.parameters"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": "f"}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tools": [1]}, "tools.0"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools.0.type"),
    ({"tools": [{"type": ["web_search"]}]}, "tools.0.type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "custom"}]}, "tools.0.custom"),
    ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools.0.custom.name"),
    ({"tools": [{"type": "web_search"}, *function(name="f", parameters=[])]}, "tools.1.function.parameters"),
    ({"tools": [{"type": "web_search"}, *TOOLS, {"type": "custom", "custom": {"name": "clock"}}]},
     "tools.3.custom.name"),
    ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools.0.function.name"),
    ({"tools": function(name="")}, "tools.0.function.name"),
    ({"tools": function(name="a b")}, "tools.0.function.name"),
    ({"tools": function(name="f\n")}, "tools.0.function.name"),
    ({"tools": function(name="n" * 129)}, "tools.0.function.name"),
    ({"tools": function(name=7)}, "tools.0.function.name"),
    ({"tools": function(description=7)}, "tools.0.function.description"),
    ({"tools": function(strict="yes")}, "tools.0.function.strict"),
    ({"tools": [*TOOLS, WEATHER]}, "tools.2.function.name"),
    ({"tools": function() * 129}, "tools"),
    ({"tools": function(parameters=[])}, PARAMETERS),
    ({"tools": function(parameters="{}")}, PARAMETERS),
    (schema(type="array"), PARAMETERS),
    (schema(type=["object", "null"]), PARAMETERS),
    (schema(properties=[]), PARAMETERS),
    (schema(properties={"a": "string"}), PARAMETERS),
    (schema(properties={"a": {"type": "objekt"}}), PARAMETERS),
    (schema(properties={"a": {"items": 3}}), PARAMETERS),
    (schema(anyOf=[]), PARAMETERS),
    (schema(required="a"), PARAMETERS),
    (schema(required=[1]), PARAMETERS),
    (schema(properties={"a": {"enum": "b"}}), PARAMETERS),
    (schema(description="x" * 65_536), PARAMETERS),
    ({"tools": function(parameters=deep(16))}, PARAMETERS),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": ["auto"]}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": 1}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
     "tool_choice.function.name"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.custom.name"),
    ({"functions": "f"}, "functions"),
    ({"functions": [{"name": "a b"}]}, "functions.0.name"),
    ({"functions": [{"name": "f"}] * 2}, "functions.1.name"),
    ({"functions": [{"name": "f"}] * 129}, "functions"),
    ({"functions": [{"name": "f", "parameters": {"type": "array"}}]}, "functions.0.parameters"),
    ({"functions": [{"name": "f"}], "tools": TOOLS}, "functions"),
    ({"functions": [{"name": "f"}], "tool_choice": "auto"}, "functions"),
    ({"functions": [{"name": "f"}], "function_call": "always"}, "function_call"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
    ({"tools": TOOLS, "function_call": {"name": "clock"}}, "function_call"),
    ({"function_call": {"name": "f"}}, "function_call"),
    (chat(calls(), {"role": "tool", "tool_call_id": "c"}), "messages.2.content"),
    (chat({"role": "assistant", "tool_calls": "f"}), "messages.1.tool_calls"),
    (chat({**calls(), "tool_calls": calls()["tool_calls"] * 129}), "messages.1.tool_calls"),
    (chat(calls(id=7)), "messages.1.tool_calls.0.id"),
    (chat(calls(name=7)), "messages.1.tool_calls.0.function.name"),
    (chat(calls(arguments=7)), "messages.1.tool_calls.0.function.arguments"),
    (chat(calls(arguments=["a"])), "messages.1.tool_calls.0.function.arguments"),
    (chat(calls(type=7)), "messages.1.tool_calls.0.type"),
    (chat(calls(type="custom")), "messages.1.tool_calls.0.function"),
]  # fmt: skip


@pytest.mark.parametrize("change, param", BAD, ids=lambda value: str(value)[:60])
def test_bad_tools(talk: Make, change: dict[str, Any], param: str) -> None:
    error = talk(HERMES).refused(**change)
    assert error["param"] == param and len(error["message"]) < 500
    assert error["message"].startswith(param)


def test_limits_are_settings(talk: Make) -> None:
    limits = Limits(max_tools=1, max_grammar_bytes=40, max_schema_depth=2)
    it = talk(HERMES, limits)
    assert it.refused(tools=[CLOCK, WEATHER])["param"] == "tools"
    assert "40" in it.refused(tools=[CLOCK])["message"]
    assert "deeper than 2" in it.refused(**schema(a=[[1]]))["message"]
    it.whole(tools=function(parameters={"a": [1]}))


def test_odd_tools_that_are_allowed_are_accepted(talk: Make) -> None:
    """Boolean schemas, unknown keywords, keywords as names of properties, and no arguments at all."""
    it = talk(HERMES)
    odd = {"type": True, "enum": {"type": ["string", "null"]}, "properties": {"items": [{}]}}
    noted = {"properties": odd, "x-note": 1}
    it.whole(tools=[*function(parameters=noted, strict=True), {"type": "function", "function": {"name": "g"}}])
    it.whole(**chat(calls(arguments=""), {**RESULT, "name": "f"}), extra_body={"tools": None, "tool_choice": None})
    it.whole(**chat({**calls(), "content": None, "refusal": None, "function_call": None, "audio": None}, RESULT))


def test_a_model_of_an_unknown_format_has_no_tools(talk: Make) -> None:
    for it in (talk("{{ tools }}{{ messages[0].content }}"), talk(HERMES, tools="none")):
        assert it.refused(tools=TOOLS)["param"] == "tools"
        it.whole(tools=TOOLS, tool_choice="none")


def test_messages_that_a_template_refuses_are_a_400(talk: Make) -> None:
    two = {"role": "assistant", "tool_calls": [{**calls()["tool_calls"][0], "id": call_id} for call_id in "cd"]}
    error = talk(LLAMA3).refused(**chat(two, RESULT))
    assert error["param"] == "messages" and "one call at a time" in error["message"]


def test_tokenize_counts_tools(talk: Make) -> None:
    it = talk(HERMES)
    it.whole(tools=TOOLS)
    body = {"messages": ASK["messages"], "tools": TOOLS}
    assert it.client.post("/tokenize", body).json()["tokens"] == it.engine.requests[0].prompt_ids
    assert it.client.post("/tokenize", body | {"tools": [CLOCK, CLOCK]}).status_code == 400


ODD: list[Any] = [None, True, 0, -1.5, "", "x", [], {}, [[]], {"a": 1}, "\ud7ff\x00", 10**30]
FULL: dict[str, Any] = {
    **ASK, "tools": [*function(parameters=deep(2), strict=True, description="d"), CLOCK],
    "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": True,
    **chat({**calls(), "content": None, "reasoning": "r"}, {**RESULT, "name": "f"}),
}  # fmt: skip


def changed(value: Any) -> Iterator[Any]:
    """`value` with one part of it replaced by something odd, or gone."""
    yield from ODD
    if isinstance(value, dict):
        for key in value:
            yield from ({**value, key: part} for part in changed(value[key]))
            yield {name: value[name] for name in value if name != key}
    if isinstance(value, list):
        for index, child in enumerate(value):
            yield from ([*value[:index], part, *value[index + 1 :]] for part in changed(child))
            yield [*value[:index], *value[index + 1 :]]


def test_no_change_of_a_request_is_an_error_of_ours(talk: Make) -> None:
    client = talk(HERMES).client
    statuses: Counter[int] = Counter()
    for body in changed(FULL):
        if isinstance(body, dict):
            response = client.post("/v1/chat/completions", body)
            statuses[response.status_code] += 1
            assert response.status_code in (200, 400, 404), (body, response.text)
    assert statuses[200] > 50 and statuses[400] > 500
