"""Tools as requests have them: the functions a model may call, and the calls it made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from deployments.api.errors import quoted
from deployments.api.request.strict_model import StrictModel


def _parse_type(value: object) -> object:
    if value != "function":
        raise PydanticCustomError("tools", f'must be "function", got {quoted(value)}')
    return value


def _parse_choice(value: object) -> object:
    """Checked here as a whole, since of a union pydantic can say only what each member lacks."""
    if value in ("none", "auto", "required") or value is None:
        return value
    if isinstance(value, dict) and value.keys() == {"type", "function"} and value["type"] == "function":
        function = value["function"]
        if isinstance(function, dict) and function.keys() == {"name"} and isinstance(function["name"], str):
            return value
    raise PydanticCustomError(
        "tools", 'must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}'
    )


FunctionType = Annotated[Literal["function"], BeforeValidator(_parse_type)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Function(StrictModel):
    """A function that a model may call."""

    name: FunctionName
    description: str | None = None
    """What it is for, in words for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments, an object's; None: it has none."""
    strict: bool | None = None
    """Whether its arguments have to match the schema."""


class Tool(StrictModel):
    """A tool; all are functions."""

    type: FunctionType
    function: Function


class _Named(StrictModel):
    name: str


class NamedChoice(StrictModel):
    """The one function that is to be called."""

    type: FunctionType
    function: _Named


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedChoice | None, BeforeValidator(_parse_choice)]


def _parse_arguments(value: object) -> object:
    """Templates need the object that OpenAI's format has as text; "" is what some clients write for none."""
    if not isinstance(value, str):
        return value
    try:
        is_object = isinstance(msgspec.json.decode(value or "{}"), dict)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        is_object = False
    if not is_object:
        raise PydanticCustomError("tools", "must be a JSON object, as a string")
    return value or "{}"


class CalledFunction(StrictModel):
    """What a model called, and with which arguments."""

    name: FunctionName
    arguments: Annotated[str, BeforeValidator(_parse_arguments)]
    """A JSON object, as text."""


class ToolCall(StrictModel):
    """A call that an assistant's message made."""

    id: str
    """What the message with the result refers to."""
    type: FunctionType
    function: CalledFunction
