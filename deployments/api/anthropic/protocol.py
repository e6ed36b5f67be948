"""Typed models of the requests of Anthropic's API, as its clients send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag
from pydantic_core import PydanticCustomError

from deployments.api.errors import quoted
from deployments.api.request.protocol import Int, taking
from deployments.api.request.strict_model import LenientModel, StrictModel
from deployments.api.tools.protocol import FunctionName

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {"container": (), "fallbacks": ([],), "mcp_servers": ([],)}
"""Fields that are not supported, with the values besides null that have no effect."""
_Role = Literal["user", "assistant", "system"]
_Preference = Literal["auto", "any", "tool", "none"]
_Thinking = Literal["enabled", "adaptive", "between_tools", "disabled"]
_ATTRIBUTION = "x-anthropic-billing-header:"
"""The beginning of a line with which Claude Code begins its system prompt; it is another one in each request."""


def _one_of(*known: str) -> BeforeValidator:
    """Have errors name the values that a field can have."""

    def check(value: object) -> object:
        if value in known:
            return value
        raise PydanticCustomError("content", f"must be one of {', '.join(known)}, got {quoted(value)}")

    return BeforeValidator(check)


class TextBlock(LenientModel):
    """Text. Other fields, such as `cache_control` and `citations`, label it."""

    type: Literal["text"]
    text: str


_Texts = str | list[TextBlock] | None


class ToolUseBlock(LenientModel):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)


class ThinkingBlock(LenientModel):
    """What the model thought before it answered."""

    type: Literal["thinking"]
    thinking: str = ""


class RedactedThinkingBlock(LenientModel):
    """What a model of Anthropic's thought, which only Anthropic can read."""

    type: Literal["redacted_thinking"]


def _parse_system(value: object) -> object:
    """Return the system prompt without that by which no two requests of Claude Code would begin alike."""
    said = [text.partition("\n")[2] if text.startswith(_ATTRIBUTION) else text for text in _texts(value, "system")]
    return "\n".join(text for text in said if text)


def _parse_result(value: object) -> object:
    return "\n".join(_texts(value, "a result"))


def _texts(value: object, what: str) -> list[str]:
    """Return a string, or the texts of blocks of text; nothing is no text."""
    if isinstance(value, str) or value is None:
        return [value or ""]
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or an array of text blocks")
    texts = []
    for block in value:
        _check_kind(block, ("text",), what)
        if not isinstance(text := block.get("text"), str):
            raise PydanticCustomError("content", 'must have blocks of the form {"type": "text", "text": "..."}')
        texts.append(text)
    return texts


def _check_kind(block: object, known: tuple[str, ...], what: str) -> None:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise PydanticCustomError("content", "must hold blocks, which are objects with a type")
    if kind not in known:
        raise PydanticCustomError(
            "content", f"has a block of type {quoted(kind)}; {what} can only have {', '.join(known)}"
        )


class ToolResultBlock(LenientModel):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str, taking(_parse_result, _Texts)] = ""
    is_error: bool | None = None


def _tag(block: object) -> str:
    """Return the tag of a block's kind; errors leave tags, which are in angle brackets, out of a field's path."""
    return f"<{block.get('type')}>" if isinstance(block, dict) else "<>"


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
    Discriminator(_tag),
]
_KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


def _parse_content(value: object) -> object:
    """Return a message's content as blocks; a string is one block of text."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or an array of blocks")
    for block in value:
        _check_kind(block, _KINDS, "a message")
    return value


def _parse_message(value: object) -> object:
    """Leave out of an answer's blocks those that only Anthropic's server writes: its own tools' calls and results.

    A client that cannot send back what it got cannot go on.
    """
    if not isinstance(value, dict) or value.get("role") != "assistant":
        return value
    content = value.get("content")
    if not isinstance(content, list):
        return value
    return {**value, "content": [block for block in content if not _is_of_server(block)]}


def _is_of_server(block: object) -> bool:
    kind = block.get("type") if isinstance(block, dict) else None
    return isinstance(kind, str) and kind not in (*_KINDS, "image", "document")


class InputMessage(LenientModel):
    """One message of a conversation."""

    role: Annotated[_Role, _one_of(*get_args(_Role))]
    content: Annotated[list[Block], FailFast(), taking(_parse_content, str | list[Block])]


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

    type: Annotated[_Preference, _one_of(*get_args(_Preference))]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(LenientModel):
    """Whether the model thinks before it answers; a model decides by itself how much."""

    type: Annotated[_Thinking, _one_of(*get_args(_Thinking))]
    budget_tokens: Int | None = None
    """Accepted and not enforced: thinking counts towards `max_tokens`."""
    display: str | None = None
    """With "omitted", blocks of thinking have no text."""


class OutputFormat(LenientModel):
    """What an answer must match."""

    type: Annotated[Literal["json_schema"], _one_of("json_schema")]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(LenientModel):
    """How the model answers."""

    format: OutputFormat | None = None
    effort: str | None = None
    """Accepted, and changes nothing."""


Label = Annotated[Any, Field(default=None, description="Accepted, and changes nothing.")]


class CountTokensRequest(StrictModel):
    """Body of POST /v1/messages/count_tokens, and a part of that of POST /v1/messages."""

    unsupported = UNSUPPORTED

    model: str
    messages: Annotated[
        list[Annotated[InputMessage, BeforeValidator(_parse_message)]], FailFast(), Field(min_length=1)
    ]
    system: Annotated[str, taking(_parse_system, _Texts)] = ""
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
