"""Checks the tools of a chat request, its choice among them, and the calls in its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from deployments.api.base import exact_json
from deployments.api.base.errors import invalid, quoted
from deployments.api.base.field_checks import at_most
from deployments.api.base.off_loop import near_or_far
from deployments.api.dialects.named import Functions
from deployments.api.dialects.tool_format import ToolFormat
from deployments.api.fields.tools import (
    AllowedChoice,
    AnyTool,
    CustomChoice,
    CustomTool,
    Function,
    NamedChoice,
    NamedFunction,
    OtherTool,
)
from deployments.api.prompt.tool_schemas import check_parameters
from deployments.config.limits import Limits

if TYPE_CHECKING:
    from deployments.api.fields.protocol import ChatRequest, Message

Choice: TypeAlias = str | NamedChoice | CustomChoice | NamedFunction | AllowedChoice
"""Which call the model may or must make."""


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The functions that a request lists, as the model is shown them."""

    functions: tuple[Function, ...]
    places: Mapping[str, str]
    """Where each function is in the request, by its name."""
    customs: frozenset[str] = frozenset()
    """Names of those that are custom tools to the client."""


@dataclass(frozen=True, slots=True)
class RequestedTools:
    """The functions that an answer may, or must, call."""

    format: ToolFormat
    offered: OfferedTools
    """All that the model is shown."""
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
    is_old = _is_of_old_form(request)
    field, choice_field = ("functions", "function_call") if is_old else ("tools", "tool_choice")
    offered = await offered_tools(limits, request.tools, request.functions)
    choice = request.function_call or request.tool_choice or ("auto" if offered.functions else "none")
    if not offered.functions:
        if choice in ("none", "auto"):
            return None
        raise invalid(
            f"{choice_field} requires a call, but {field} is empty, or has only tools that this server "
            "cannot run; list functions there.",
            choice_field,
        )
    may_be_called = _allowed(offered.functions, choice, field)
    if choice == "none":
        return None
    if form is None:
        raise invalid(
            f"{field} is not supported for this model, whose chat template shows no format of calls that this "
            "server knows. Leave it out, or name the format in the setting chat.tools.",
            field,
            "unsupported_field",
        )
    is_named = not isinstance(choice, str | AllowedChoice)
    is_single = is_named or is_old or request.parallel_tool_calls is False
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
    return RequestedTools(
        form, offered, may_be_called, mode == "required" or is_named, is_single, limits.closed_objects
    )


def _is_of_old_form(request: ChatRequest) -> bool:
    """Whether functions are given in OpenAI's older form. Raises `ApiError` 400 where both forms are used."""
    old = "functions" if request.functions else "function_call" if request.function_call is not None else None
    new = "tools" if request.tools else "tool_choice" if request.tool_choice is not None else None
    if old is not None and new is not None:
        raise invalid(f"{old} and {new} cannot be combined: {old} is the older form; give only tools.", old)
    return old is not None


async def offered_tools(
    limits: Limits, tools: Sequence[AnyTool], functions: Sequence[Function] = ()
) -> OfferedTools:
    """Return the offered tools of either form. Raises `ApiError` 400 that names the field."""
    at_most(limits, "max_tools", "functions", len(functions), "functions")
    at_most(limits, "max_tools", "tools", len(tools), "tools")
    found = {f"functions.{index}": function for index, function in enumerate(functions)}
    customs = set()
    for index, tool in enumerate(tools):
        if not isinstance(tool, OtherTool):
            found[f"tools.{index}.{tool.type}"] = tool.function
            if isinstance(tool, CustomTool):
                customs.add(tool.function.name)
    places: dict[str, str] = {}
    for place, function in found.items():
        if places.setdefault(function.name, place) != place:
            path = f"{place}.name"
            raise invalid(f"{path} is {quoted(function.name)}, as in an earlier tool; names must differ.", path)
    offered = OfferedTools(tuple(found.values()), places, frozenset(customs))
    await near_or_far(
        size_of(offered.functions), limits.inline_text_chars, partial(_check_parameters, limits, offered)
    )
    return offered


def size_of(functions: Sequence[Function]) -> int:
    """Estimate how many characters describe `functions` in a prompt."""
    described = (len(function.name) + len(function.description or "") for function in functions)
    schemas = (len(exact_json.encode(function.parameters)) for function in functions)
    return sum(described) + sum(schemas)


def check_conversation(limits: Limits, messages: Sequence[Message]) -> None:
    """Raise `ApiError` 400 for a message with too many calls."""
    for index, message in enumerate(messages):
        at_most(limits, "max_tools", f"messages.{index}.tool_calls", len(message.tool_calls), "calls")


def _allowed(functions: tuple[Function, ...], choice: Choice, field: str) -> tuple[Function, ...]:
    """Return the functions that a choice allows. Raises `ApiError` 400 for those that are not in `field`."""
    if isinstance(choice, str):
        return functions
    if isinstance(choice, AllowedChoice):
        path, names = "tool_choice.allowed_tools.tools", {tool.name for tool in choice.allowed_tools.tools}
    else:
        path = "function_call.name" if isinstance(choice, NamedFunction) else f"tool_choice.{choice.type}.name"
        names = {choice.name}
    if unknown := names - {function.name for function in functions}:
        has = "has" if isinstance(choice, AllowedChoice) else "is"
        raise invalid(f"{path} {has} {quoted(min(unknown))}, which is not among {field}.", path)
    return tuple(function for function in functions if function.name in names)


def _check_parameters(limits: Limits, offered: OfferedTools) -> None:
    for function in offered.functions:
        if function.parameters is not None:
            check_parameters(function.parameters, limits, f"{offered.places[function.name]}.parameters")
