"""`allowed_tools`: the model is shown all tools, and may, or must, call some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.deployments.api.dialects.conftest import TOOLS, Talk
from tests.deployments.support.chat_templates import HERMES

Make = Callable[..., Talk]


def choice(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_all_are_shown_and_only_those_are_calls(talk: Make) -> None:
    it = talk(HERMES)
    it.engine.says = '<tool_call>{"name": "clock", "arguments": {"zone": "utc"}}</tool_call>'
    message = it.whole(tools=TOOLS, tool_choice=choice("auto", "clock")).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["clock"]
    assert "get_weather" in it.prompt() and "clock" in it.prompt()
    assert it.engine.requests[-1].sampling.grammar is None
    message = it.whole(tools=TOOLS, tool_choice=choice("auto", "get_weather")).choices[0].message
    assert message.tool_calls is None and "clock" in message.content


def test_one_of_them_is_called_where_one_must_be(talk: Make) -> None:
    it = talk(HERMES)
    it.whole(tools=TOOLS, tool_choice=choice("required", "clock"))
    grammar = it.engine.requests[-1].sampling.grammar
    assert grammar is not None and "clock" in grammar.source and "get_weather" not in grammar.source


@pytest.mark.parametrize("wrong", [choice("auto", "other"), choice("none", "clock"), choice("auto")])
def test_wrong_choices_are_named(talk: Make, wrong: dict[str, Any]) -> None:
    assert talk(HERMES).refused(tools=TOOLS, tool_choice=wrong)["param"].startswith("tool_choice")
