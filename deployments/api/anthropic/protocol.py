"""Typed models of the requests of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Discriminator, FailFast, Field, JsonValue, Tag

from deployments.api.anthropic.content import (
    InputMessage,
    Texts,
    one_of,
    parse_system,
    taken_message,
    taken_texts,
)
from deployments.api.fields.field_values import other_than, taking
from deployments.api.fields.ignored import IgnoredFields
from deployments.api.fields.offered_tools import name_left_out
from deployments.api.fields.protocol import Int
from deployments.api.fields.strict_model import StrictModel
from deployments.api.fields.tools import FunctionName, OtherTool, kind_of

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {"container": (), "fallbacks": ([],)}
"""Fields that are not supported, with the values besides null that have no effect."""
_Preference = Literal["auto", "any", "tool", "none"]
_Effort = Literal["low", "medium", "high", "xhigh", "max"]
_Thinking = Literal["enabled", "adaptive", "between_tools", "disabled"]


class SchemaTool(StrictModel):
    """A tool that the client runs, and describes with a schema."""

    name: FunctionName
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    """JSON schema of the input, which is an object."""
    strict: bool | None = None
    """Whether the input must match the schema even where the call was not forced."""


class OtherClaudeTool(OtherTool):
    """A tool whose description only Anthropic's models know: it is not offered to the model."""

    type: Annotated[str, other_than("custom")]


def _tag(tool: object) -> str:
    """Return the tag of a tool's kind; errors leave tags, which are in angle brackets, out of a field's path."""
    kind = kind_of(tool)
    return "<other>" if isinstance(kind, str) and kind != "custom" else "<schema>"


_Tool = Annotated[
    Annotated[SchemaTool, Tag("<schema>")] | Annotated[OtherClaudeTool, Tag("<other>")], Discriminator(_tag)
]


_ONE_BY_NAME: dict[str, JsonValue] = {
    "anyOf": [
        {"properties": {"type": {"const": "tool"}, "name": {"type": "string"}}, "required": ["name"]},
        {"properties": {"type": {"not": {"const": "tool"}}}},
    ]
}


class ToolPreference(StrictModel):
    """Whether the model may ("auto"), must ("any", or "tool" by name) or must not ("none") use a tool."""

    model_config = ConfigDict(json_schema_extra=_ONE_BY_NAME)

    type: Annotated[_Preference, one_of(*get_args(_Preference))]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(StrictModel):
    """Whether the model is to think before it answers, for templates that know it."""

    type: Annotated[_Thinking, one_of(*get_args(_Thinking))]
    budget_tokens: Annotated[Int, Field(json_schema_extra={"minimum": 1, "maximum": 2**31 - 1})] | None = None
    """Most tokens of thinking, for models whose thinking ends with a token of its own."""
    display: str | None = None
    """With "omitted", blocks of thinking have no text."""


class OutputFormat(StrictModel):
    """A format that an answer must match."""

    type: Annotated[Literal["json_schema"], one_of("json_schema")]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """How the model answers."""

    format: OutputFormat | None = None
    effort: Annotated[_Effort | None, one_of(*get_args(_Effort), None)] = None
    """How much the model is to think, for templates that know it."""


_LABEL = "Accepted, and changes nothing."
Label = Annotated[Any, Field(default=None, description=_LABEL)]


def _name_those_of_answers(schema: dict[str, Any]) -> None:
    """Describe the fields whose values counting ignores, because clients send the whole body of a request."""
    for name in sorted(of_answers()):
        schema["properties"].setdefault(name, {"description": _LABEL})


class CountTokensRequest(StrictModel):
    """Body of POST /v1/messages/count_tokens, and a part of that of POST /v1/messages."""

    model_config = ConfigDict(json_schema_extra=_name_those_of_answers)
    unsupported = UNSUPPORTED

    model: str
    messages: Annotated[list[InputMessage], FailFast(), Field(min_length=1)]
    system: Annotated[str, taking(parse_system, Texts)] = ""
    tools: Annotated[list[_Tool] | None, FailFast()] = None
    tool_choice: ToolPreference | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""
    anthropic_beta: Label
    anthropic_version: Label
    cache_control: Label
    context_management: Label
    metadata: Label
    speed: Label

    @classmethod
    def taken(cls, fields: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
        """See `StrictModel`."""
        if isinstance(messages := fields.get("messages"), list):
            fields["messages"] = [
                taken_message(message, ignored, f"messages.{index}") for index, message in enumerate(messages)
            ]
        if "system" in fields:
            fields["system"] = taken_texts(fields["system"], ignored, "system")
        name_left_out(fields.get("tools"), ignored, kinds=("custom",))
        return fields


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages. Fields that Anthropic's API lacks are as in the body of POST
    /v1/chat/completions."""

    max_tokens: Int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    diagnostics: Label
    inference_geo: Label
    service_tier: Label
    user_profile_id: Label
    cache_salt: str | None = None
    include_timings: bool | None = None
    priority: Int | None = None
    prompt_cache_key: str | None = None
    seed: Int | None = None


def of_answers() -> Set[str]:
    """Return the names of fields that change nothing in a body to be counted: only an answer needs them."""
    return MessagesRequest.model_fields.keys() - CountTokensRequest.model_fields.keys()
