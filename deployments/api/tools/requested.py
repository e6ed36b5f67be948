"""Checks the tools of a chat request, its choice among them, and the calls in its messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from deployments.api.errors import at_most, invalid, quoted
from deployments.api.off_loop import near_or_far
from deployments.api.tools.named import Functions
from deployments.api.tools.protocol import AllowedChoice, Function, NamedChoice, Tool
from deployments.api.tools.schema import check_parameters
from deployments.api.tools.tool_format import ToolFormat
from deployments.config.limits import Limits

if TYPE_CHECKING:
    from deployments.api.request.protocol import ChatRequest, Message


@dataclass(frozen=True, slots=True)
class RequestedTools:
    """The functions that an answer may, or must, call."""

    format: ToolFormat
    functions: tuple[Function, ...]
    """All functions that the model is shown."""
    callable: tuple[Function, ...]
    """The functions that it may call; with a named choice, only that one."""
    is_forced: bool
    """Whether the answer must be a call."""
    is_single: bool
    """Whether the answer may have only one call."""
    closes_objects: bool = True
    """Whether arguments have only properties that a schema names, where it does not say."""

    @property
    def is_strict(self) -> bool:
        """Whether even a call that was not required must match its schema."""
        return any(function.strict for function in self.callable)

    @property
    def schemas(self) -> Functions:
        """The functions that may be called, with the schemas of their arguments."""
        return {function.name: function.parameters for function in self.callable}


async def requested_tools(limits: Limits, request: ChatRequest, form: ToolFormat | None) -> RequestedTools | None:
    """Return the requested tools, or None if no calls may be made. Raises `ApiError` 400 that names the field.

    With "none" the model is not shown the tools, because it would call them nevertheless.
    """
    choice = request.tool_choice or ("auto" if request.tools else "none")
    functions = await checked_functions(limits, request.tools)
    if not functions:
        if choice in ("none", "auto"):
            return None
        raise invalid("tool_choice requires a call, but tools is empty; list the functions there.", "tool_choice")
    allowed = _allowed(functions, choice)
    if choice == "none":
        return None
    if form is None:
        raise invalid(
            "tools is not supported for this model, whose chat template shows no format of calls that this server "
            "knows. Leave it out, or name the format in the setting chat.tools.",
            "tools",
            "unsupported_field",
        )
    is_named = isinstance(choice, NamedChoice)
    is_single = is_named or request.parallel_tool_calls is False
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
    return RequestedTools(
        form, functions, allowed, mode == "required" or is_named, is_single, limits.closed_objects
    )


async def checked_functions(limits: Limits, tools: Sequence[Tool]) -> tuple[Function, ...]:
    """Return the functions of `tools`. Raises `ApiError` 400 that names the field."""
    at_most(limits, "max_tools", "tools", len(tools), "tools")
    functions = tuple(tool.function for tool in tools)
    seen: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in seen:
            path = f"tools.{index}.function.name"
            raise invalid(f"{path} is {quoted(function.name)}, as in an earlier tool; names must differ.", path)
        seen.add(function.name)
    check = partial(_check_parameters, limits, functions)
    await near_or_far(size_of(functions), limits.inline_text_chars, check)
    return functions


def size_of(functions: Sequence[Function]) -> int:
    """Estimate how many characters describe `functions` in a prompt."""
    described = (len(function.name) + len(function.description or "") for function in functions)
    schemas = (len(msgspec.json.encode(function.parameters)) for function in functions)
    return sum(described) + sum(schemas)


def check_conversation(limits: Limits, messages: Sequence[Message]) -> None:
    """Raise `ApiError` 400 for a message with too many calls."""
    for index, message in enumerate(messages):
        at_most(limits, "max_tools", f"messages.{index}.tool_calls", len(message.tool_calls), "calls")


def _allowed(functions: tuple[Function, ...], choice: str | NamedChoice | AllowedChoice) -> tuple[Function, ...]:
    if isinstance(choice, AllowedChoice):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        if unknown := set(names) - {function.name for function in functions}:
            path = "tool_choice.allowed_tools.tools"
            raise invalid(f"{path} has {quoted(min(unknown))}, which is not among tools.", path)
        return tuple(function for function in functions if function.name in names)
    if not isinstance(choice, NamedChoice):
        return functions
    named = tuple(function for function in functions if function.name == choice.function.name)
    if not named:
        path = "tool_choice.function.name"
        raise invalid(f"{path} is {quoted(choice.function.name)}, which is not among tools.", path)
    return named


def _check_parameters(limits: Limits, functions: Sequence[Function]) -> None:
    for index, function in enumerate(functions):
        if function.parameters is not None:
            check_parameters(function.parameters, limits, f"tools.{index}.function.parameters")
