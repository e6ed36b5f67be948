"""The typed model of POST /v1/responses. The items of `input` are checked in `items.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from deployments.api.base.errors import quoted
from deployments.api.fields.field_values import none_as_empty, taking
from deployments.api.fields.ignored import RESPONSES_UNSUPPORTED, IgnoredFields
from deployments.api.fields.offered_tools import allowed, name_left_out
from deployments.api.fields.protocol import Int, ReasoningEffort, SampledRequest, Verbosity
from deployments.api.fields.strict_model import StrictModel
from deployments.api.responses.item_schema import AnyItem
from deployments.api.responses.items import usable_items
from deployments.api.responses.tools import FLAT, AnyFlatTool

INCLUDABLE = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "message.output_text.logprobs",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""Values of `include`. Most are about tools that this server does not have; reasoning is never encrypted."""


def _parse_include(value: object) -> object:
    for index, name in enumerate(value if isinstance(value, list) else []):
        if not isinstance(name, str) or name not in INCLUDABLE:
            raise PydanticCustomError("field", f"has at {index} {quoted(name)}, which is none of OpenAI's values")
    return [] if value is None else value


def _parse_input(value: object) -> object:
    if not isinstance(value, str | list):
        raise PydanticCustomError("field", f"must be a text or an array of items, got {quoted(value)}")
    return value


def _parse_choice(value: object) -> object:
    if value in ("none", "auto", "required") or value is None:
        return value
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, dict) or kind not in ("function", "custom", "allowed_tools"):
        raise PydanticCustomError(
            "tools",
            'must be "none", "auto", "required", {"type": "function", "name": "..."}, the same with "custom", or '
            f'{{"type": "allowed_tools", "mode": "auto", "tools": [...]}}, got {quoted(kind)}; this server runs '
            "no tools itself",
        )
    return value


def _parse_format(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else value
    if kind not in ("text", "json_object", "json_schema"):
        raise PydanticCustomError(
            "response_format", f"must have the type text, json_object or json_schema, got {quoted(kind)}"
        )
    return value


def _parse_conversation(value: object) -> object:
    name = value.get("id") if isinstance(value, dict) else value
    if value is not None and not isinstance(name, str):
        raise PydanticCustomError("field", 'must be the name of a conversation, or {"id": "conv_..."}')
    return name


class ConversationName(StrictModel):
    """A conversation, by its name."""

    id: str


class TextFormat(StrictModel):
    """A format that the answer's text must match."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictModel):
    """How the answer's text is formed."""

    format: Annotated[TextFormat | None, BeforeValidator(_parse_format, json_schema_input_type=TextFormat)] = None
    verbosity: Verbosity = None
    """How much the model is to say, for templates that know it."""


class ReasoningOptions(StrictModel):
    """How the model reasons."""

    effort: ReasoningEffort = None
    """How much it is to think, for templates that know it."""
    summary: str | None = None
    """Accepted: reasoning is returned in full, not as a summary."""
    generate_summary: str | None = None


class ResponsesRequest(SampledRequest):
    """Body of POST /v1/responses."""

    unsupported = RESPONSES_UNSUPPORTED

    input: Annotated[Any, BeforeValidator(_parse_input, json_schema_input_type=str | list[AnyItem])]
    """A text from the user, or the items of a conversation."""
    instructions: str | None = None
    """The first system message; not kept for responses that continue this one."""
    previous_response_id: str | None = None
    """The stored response that this one continues."""
    conversation: Annotated[
        str | None, BeforeValidator(_parse_conversation, json_schema_input_type=str | ConversationName | None)
    ] = None
    """The conversation that this response continues, and becomes a part of."""
    store: bool | None = None
    """Whether the response is kept, so that it can be read and continued; true by default."""
    background: bool | None = None
    """Answer immediately, and generate afterwards."""
    max_output_tokens: Int | None = None
    metadata: dict[str, str] | None = None
    include: Annotated[list[str], BeforeValidator(_parse_include, json_schema_input_type=list[str] | None)] = (
        Field(default_factory=list)
    )
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[AnyFlatTool], taking(none_as_empty, list[AnyFlatTool] | None)] = Field(
        default_factory=list
    )
    """The functions and custom tools that the model may call. Other tools are omitted."""
    tool_choice: Annotated[
        Any,
        BeforeValidator(
            _parse_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any] | None
        ),
    ] = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int | None = None
    """Accepted: it bounds calls of tools that a server runs itself, and this one runs none."""
    thinking_token_budget: Int | None = None
    """Tokens of reasoning after which its end is forced; -1: as many as the model wants."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    top_logprobs: Int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """"auto" omits the oldest items of a conversation that does not fit the context."""
    user: str | None = None
    safety_identifier: str | None = None

    @classmethod
    def taken(cls, fields: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
        """See `StrictModel`."""
        if "input" in fields:
            fields["input"] = usable_items(fields["input"], ignored)
        name_left_out(fields.get("tools"), ignored, kinds=FLAT)
        if "tool_choice" in fields:
            fields["tool_choice"] = allowed(fields["tool_choice"], ignored, kinds=FLAT)
        return fields

    @property
    def is_stored(self) -> bool:
        """Whether the response is to be kept."""
        return self.store is not False


class InputTokensRequest(ResponsesRequest):
    """Body of POST /v1/responses/input_tokens: that of a response, whose prompt is counted."""

    input: Annotated[Any, taking(_parse_input, str | list[AnyItem])] = Field(default_factory=list)
