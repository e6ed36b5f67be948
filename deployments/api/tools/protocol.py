"""Tools in requests: the functions that a model may call, and the calls that it made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from deployments.api.errors import quoted
from deployments.api.request.strict_model import LenientModel, StrictModel


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
    if isinstance(value, dict) and value.keys() == {"type", "allowed_tools"} and value["type"] == "allowed_tools":
        return value
    raise PydanticCustomError(
        "tools",
        'must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}, '
        'or {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}',
    )


def _parse_mode(value: object) -> object:
    if value not in ("auto", "required"):
        raise PydanticCustomError("tools", f'must be "auto" or "required", got {quoted(value)}')
    return value


FunctionType = Annotated[Literal["function"], BeforeValidator(_parse_type)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


class Function(StrictModel):
    """A function that a model may call."""

    name: FunctionName
    description: str | None = None
    """What the function does, described for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, which are an object; None if there are none."""
    strict: bool | None = None
    """Whether arguments must match the schema."""


class Tool(LenientModel):
    """A tool; functions are the only type."""

    type: FunctionType
    function: Function


class _Named(StrictModel):
    name: str


class NamedChoice(StrictModel):
    """A choice of the one function to call."""

    type: FunctionType
    function: _Named


class _AllowedTools(StrictModel):
    mode: Annotated[Literal["auto", "required"], BeforeValidator(_parse_mode)]
    tools: Annotated[list[NamedChoice], Field(min_length=1)]


class AllowedChoice(StrictModel):
    """A choice of some functions, which may be called, or one of which must be."""

    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None, BeforeValidator(_parse_choice)
]


def _parse_arguments(value: object) -> object:
    """Return arguments as text. Some servers give an object, and some clients send nothing for no arguments."""
    if value is None or value == "":
        return "{}"
    return msgspec.json.encode(value).decode() if isinstance(value, dict) else value


def _parse_call_type(value: object) -> object:
    return "function" if value is None else _parse_type(value)


class CalledFunction(LenientModel):
    """The function that a model called, and the arguments."""

    name: str
    """Another model's server may have allowed names that this one does not."""
    arguments: Annotated[
        str, BeforeValidator(_parse_arguments, json_schema_input_type=str | dict[str, Any] | None)
    ] = "{}"
    """What the model wrote. It should be a JSON object, but may have been cut off, or malformed."""


class ToolCall(LenientModel):
    """A call in an assistant's message."""

    id: str | None = None
    """The id to which the message with the result refers."""
    type: Annotated[
        Literal["function"], BeforeValidator(_parse_call_type, json_schema_input_type=Literal["function"] | None)
    ] = "function"
    function: CalledFunction
