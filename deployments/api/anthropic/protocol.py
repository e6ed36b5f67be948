"""Typed models of the requests of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, FailFast, Field
from pydantic_core import PydanticCustomError

from deployments.api.anthropic.content import InputMessage, Texts, one_of, parse_message, parse_system
from deployments.api.errors import quoted
from deployments.api.request.field_values import taking
from deployments.api.request.protocol import Int
from deployments.api.request.strict_model import LenientModel, StrictModel
from deployments.api.tools.protocol import FunctionName

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {"container": (), "fallbacks": ([],), "mcp_servers": ([],)}
"""Fields that are not supported, with the values besides null that have no effect."""
_Preference = Literal["auto", "any", "tool", "none"]
_Effort = Literal["low", "medium", "high", "xhigh", "max"]
_Thinking = Literal["enabled", "adaptive", "between_tools", "disabled"]


def _parse_tool_type(value: object) -> object:
    if value in (None, "custom"):
        return "custom"
    raise PydanticCustomError(
        "tools", f'must be "custom", got {quoted(value)}: this server has no tools of its own, so describe yours'
    )


class CustomTool(LenientModel):
    """A tool that the client runs."""

    name: FunctionName
    type: Annotated[Literal["custom"], taking(_parse_tool_type, Literal["custom"] | None)] = "custom"
    description: str | None = None
    input_schema: dict[str, Any]
    """JSON schema of the input, which is an object."""
    strict: bool | None = None
    """Whether the input must match the schema even where the call was not forced."""


class ToolPreference(LenientModel):
    """Whether the model may ("auto"), must ("any", or "tool" by name) or must not ("none") use a tool."""

    type: Annotated[_Preference, one_of(*get_args(_Preference))]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(LenientModel):
    """Whether the model is to think before it answers, for templates that know it."""

    type: Annotated[_Thinking, one_of(*get_args(_Thinking))]
    budget_tokens: Int | None = None
    """Most tokens of thinking, for models whose thinking ends with a token of its own."""
    display: str | None = None
    """With "omitted", blocks of thinking have no text."""


class OutputFormat(LenientModel):
    """What an answer must match."""

    type: Annotated[Literal["json_schema"], one_of("json_schema")]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(LenientModel):
    """How the model answers."""

    format: OutputFormat | None = None
    effort: Annotated[_Effort | None, one_of(*get_args(_Effort), None)] = None
    """How much the model is to think, for templates that know it."""


Label = Annotated[Any, Field(default=None, description="Accepted, and changes nothing.")]


class CountTokensRequest(StrictModel):
    """Body of POST /v1/messages/count_tokens, and a part of that of POST /v1/messages."""

    unsupported = UNSUPPORTED

    model: str
    messages: Annotated[
        list[Annotated[InputMessage, BeforeValidator(parse_message)]], FailFast(), Field(min_length=1)
    ]
    system: Annotated[str, taking(parse_system, Texts)] = ""
    tools: Annotated[list[CustomTool] | None, FailFast()] = None
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


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages. What Anthropic's has not is as in the body of POST /v1/chat/completions."""

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
