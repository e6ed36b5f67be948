"""Selects the tools that the model is offered: functions and custom tools, which the client runs.

The server would have to run all others, such as a web search. They are omitted and named.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic.config import JsonDict

from deployments.api.base.errors import invalid, quoted
from deployments.api.fields.ignored import IgnoredFields

OFFERED = frozenset({"function", "custom"})
"""Types of tools."""
IS_GRAMMAR: JsonDict = {"properties": {"type": {"const": "grammar"}}}
"""The schema of a custom tool's format that the model is not held to."""
NAMESPACE = "namespace"
"""The type of a group of tools, in OpenAI's Responses API."""


def name_left_out(
    tools: object, ignored: IgnoredFields, path: str = "tools", kinds: Collection[str] = OFFERED
) -> None:
    """Name the tools of an array that are none of `kinds`, and the grammars that the model is not held to.

    They stay in the array, so that errors number all tools as the client does. Raises `ApiError` 400 where the
    setting refuses them.
    """
    for index, tool in enumerate(tools if isinstance(tools, list) else []):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or not isinstance(kind, str):
            continue
        if kind not in kinds:
            leave_out(kind, ignored, f"{path}.{index}")
        elif kind == NAMESPACE:
            name_left_out(tool.get("tools"), ignored, f"{path}.{index}.tools")
        elif kind == "custom":
            _name_grammar(tool, ignored, f"{path}.{index}")


def allowed(choice: object, ignored: IgnoredFields, kinds: Collection[str] = OFFERED) -> object:
    """Return a choice, of chat or the Responses API, without those allowed tools that are none of `kinds`.

    Raises `ApiError` 400 where no tool is left, or the setting refuses to leave one out.
    """
    of_chat = choice.get("allowed_tools") if isinstance(choice, dict) else None
    given = of_chat if isinstance(of_chat, dict) else choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools" or not isinstance(given, dict):
        return choice
    if not isinstance(tools := given.get("tools"), list):
        return choice
    kept = []
    path = "tool_choice.tools" if given is choice else "tool_choice.allowed_tools.tools"
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            leave_out(kind, ignored, f"{path}.{index}")
        else:
            kept.append(tool)
    if tools and not kept:
        raise invalid(f"{path} has only tools that this server cannot run; list functions there.", path)
    taken = {**given, "tools": kept}
    return taken if given is choice else {**choice, "allowed_tools": taken}


def leave_out(kind: str, ignored: IgnoredFields, path: str) -> None:
    """Leave out the tool at `path`. Raises `ApiError` 400 where the setting refuses it."""
    ignored.leave_out(path, kind, f"is a tool of the type {quoted(kind)}, which this server cannot run")


def _name_grammar(tool: dict[str, Any], ignored: IgnoredFields, path: str) -> None:
    """Name the grammar of a custom tool, which chat has in an object of its own."""
    if isinstance(custom := tool.get("custom"), dict):
        tool, path = custom, f"{path}.custom"
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        ignored.leave_out(f"{path}.format", "grammar", "is a grammar, shown to the model but not enforced")
