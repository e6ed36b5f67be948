"""Tools in requests: the functions that a model may call, and the calls that it made."""

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
    """Check the value as a whole, as pydantic's errors for a union only list what each member lacks."""
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
    """What the function does, described for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, which are an object; None if there are none."""
    strict: bool | None = None
    """Whether arguments must match the schema."""


class Tool(StrictModel):
    """A tool; functions are the only type."""

    type: FunctionType
    function: Function


class _Named(StrictModel):
    name: str


class NamedChoice(StrictModel):
    """A choice of the one function to call."""

    type: FunctionType
    function: _Named


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedChoice | None, BeforeValidator(_parse_choice)]


def _parse_arguments(value: object) -> object:
    """Check that the text is an object, as templates need one; some clients send "" for no arguments."""
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
    """The function that a model called, and the arguments."""

    name: FunctionName
    arguments: Annotated[str, BeforeValidator(_parse_arguments)]
    """A JSON object, as text."""


class ToolCall(StrictModel):
    """A call in an assistant's message."""

    id: str
    """The id to which the message with the result refers."""
    type: FunctionType
    function: CalledFunction
