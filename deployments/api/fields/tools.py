"""Tools in requests: those that a model may call, the choice among them, and the calls that it made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field
from pydantic import Tag as Tagged
from pydantic_core import PydanticCustomError

from deployments.api.base import exact_json
from deployments.api.base.errors import quoted
from deployments.api.dialects.custom import SCHEMA
from deployments.api.fields.field_values import other_than
from deployments.api.fields.offered_tools import IS_GRAMMAR, OFFERED
from deployments.api.fields.strict_model import LEFT_OUT, LeftOut, StrictModel


def _parse_type(value: object) -> object:
    if value != "function":
        raise PydanticCustomError("tools", f'must be "function", got {quoted(value)}')
    return value


def _parse_choice(value: object) -> object:
    """Check the value as a whole, as pydantic's errors for a union only list what each member lacks."""
    if value in ("none", "auto", "required") or value is None:
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind in ("function", "custom") and value.keys() == {"type", kind}:
        tool = value[kind]
        if isinstance(tool, dict) and tool.keys() == {"name"} and isinstance(tool["name"], str):
            return value
    if isinstance(value, dict) and kind == "allowed_tools" and value.keys() == {"type", "allowed_tools"}:
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
    """A description of the function for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, which are an object; None if there are none."""
    strict: bool | None = None
    """Whether arguments must match the schema."""


class Tool(StrictModel):
    """A function."""

    type: FunctionType
    function: Function


class CustomGrammar(StrictModel):
    """The syntax of an input: shown to the model, but not enforced."""

    definition: str
    syntax: Literal["lark", "regex"]


class CustomFormat(StrictModel):
    """The form of an input."""

    model_config = ConfigDict(json_schema_extra={LEFT_OUT: IS_GRAMMAR})

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class Custom(StrictModel):
    """The definition of a custom tool."""

    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None


class CustomTool(StrictModel):
    """A tool whose input is a text."""

    type: Literal["custom"]
    custom: Custom

    @property
    def function(self) -> Function:
        """The function that it is to the model."""
        told, form = [self.custom.description], self.custom.format
        if form is not None and form.grammar is not None:
            told.append(f"The input matches this grammar ({form.grammar.syntax}):\n{form.grammar.definition}")
        return Function(
            name=self.custom.name, description="\n\n".join(filter(None, told)) or None, parameters=SCHEMA
        )


class OtherTool(LeftOut):
    """A tool that this server would have to run, and does not offer to the model."""

    type: Annotated[str, other_than(*OFFERED)]


def kind_of(tool: object) -> object:
    """Return a tool's type, parsed or not."""
    return tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)


def tag_of(tool: object) -> str:
    """Return the tag of a tool's kind; errors leave tags, which are in angle brackets, out of a field's path."""
    kind = kind_of(tool)
    if not isinstance(kind, str) or kind == "function":
        return "<function>"
    return "<custom>" if kind == "custom" else "<other>"


AnyTool = Annotated[
    Annotated[Tool, Tagged("<function>")]
    | Annotated[CustomTool, Tagged("<custom>")]
    | Annotated[OtherTool, Tagged("<other>")],
    Discriminator(tag_of),
]


class NamedFunction(StrictModel):
    """The one function to call, by its name."""

    name: str


class NamedChoice(StrictModel):
    """A choice of the one function to call."""

    type: FunctionType
    function: NamedFunction

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.name


class CustomChoice(StrictModel):
    """A choice of the one custom tool to call."""

    type: Literal["custom"]
    custom: NamedFunction

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.custom.name


_OneTool = Annotated[
    Annotated[NamedChoice, Tagged("<function>")] | Annotated[CustomChoice, Tagged("<custom>")],
    Discriminator(lambda tool: "<custom>" if tag_of(tool) == "<custom>" else "<function>"),
]


class _AllowedTools(StrictModel):
    mode: Annotated[Literal["auto", "required"], BeforeValidator(_parse_mode)]
    tools: Annotated[list[_OneTool], Field(min_length=1)]


class AllowedChoice(StrictModel):
    """A choice of some functions, which may be called, or one of which must be."""

    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice | CustomChoice | AllowedChoice | None,
    BeforeValidator(_parse_choice),
]


def _parse_function_call(value: object) -> object:
    if (
        value is None
        or value in ("none", "auto")
        or (isinstance(value, dict) and isinstance(value.get("name"), str))
    ):
        return value
    raise PydanticCustomError("tools", 'must be "none", "auto" or {"name": "..."}')


FunctionCall = Annotated[Literal["none", "auto"] | NamedFunction | None, BeforeValidator(_parse_function_call)]
"""The older form of a choice."""


def _parse_arguments(value: object) -> object:
    """Return arguments as text. Some servers return an object, and some clients send null or "" for no
    arguments."""
    if value is None or value == "":
        return "{}"
    return exact_json.encode(value).decode() if isinstance(value, dict) else value


def _parse_call_type(value: object) -> object:
    return "function" if value is None else _parse_type(value)


class CalledFunction(StrictModel):
    """The function that a model called, and the arguments."""

    name: str
    """Another model's server may have allowed names that this one does not."""
    arguments: Annotated[
        str, BeforeValidator(_parse_arguments, json_schema_input_type=str | dict[str, Any] | None)
    ] = "{}"
    """The model's text. It should be a JSON object, but may be cut off or malformed."""


class ToolCall(StrictModel):
    """A call in an assistant's message."""

    id: str | None = None
    """The id to which the message with the result refers."""
    type: Annotated[
        Literal["function"], BeforeValidator(_parse_call_type, json_schema_input_type=Literal["function"] | None)
    ] = "function"
    function: CalledFunction


class CalledCustom(StrictModel):
    """The custom tool that a model called, and the input."""

    name: str
    input: Any = None


class CustomCall(StrictModel):
    """A call of a custom tool, as /openapi.json describes it."""

    id: str | None = None
    type: Literal["custom"]
    custom: CalledCustom


class OtherCall(LeftOut):
    """A call of a tool that other servers run."""

    type: Annotated[str, other_than(*OFFERED)]


AnyCall = ToolCall | CustomCall | OtherCall
