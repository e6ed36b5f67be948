"""What conversations consist of in Anthropic's API: messages of blocks, as its clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag
from pydantic_core import PydanticCustomError

from deployments.api.errors import quoted
from deployments.api.request.field_values import taking
from deployments.api.request.strict_model import LenientModel

_Role = Literal["user", "assistant", "system"]
_ATTRIBUTION = "x-anthropic-billing-header:"
"""The beginning of a line with which Claude Code begins its system prompt; it is another one in each request."""


def one_of(*known: str | None) -> BeforeValidator:
    """Have errors name the values that a field can have."""
    names = ", ".join(name for name in known if name is not None)

    def check(value: object) -> object:
        if value in known:
            return value
        raise PydanticCustomError("content", f"must be one of {names}, got {quoted(value)}")

    return BeforeValidator(check)


class TextBlock(LenientModel):
    """Text. Other fields, such as `cache_control` and `citations`, label it."""

    type: Literal["text"]
    text: str


Texts = str | list[TextBlock] | None


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


def parse_system(value: object) -> object:
    """Return the system prompt without that by which no two requests of Claude Code would begin alike."""
    said = [text.partition("\n")[2] if text.startswith(_ATTRIBUTION) else text for text in _texts(value, "system")]
    return "\n".join(text for text in said if text)


def _parse_result(value: object) -> object:
    """Return the text of a result. Tools that a search has found are named: the model is shown all of them."""
    if isinstance(value, list):
        value = [_named_tool(block) for block in value]
    return "\n".join(_texts(value, "a result"))


def _named_tool(block: object) -> object:
    is_reference = isinstance(block, dict) and block.get("type") == "tool_reference"
    return {"type": "text", "text": block.get("tool_name")} if is_reference else block  # type: ignore[attr-defined]


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
    content: Annotated[str, taking(_parse_result, Texts)] = ""
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


def parse_message(value: object) -> object:
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

    role: Annotated[_Role, one_of(*get_args(_Role))]
    content: Annotated[list[Block], FailFast(), taking(_parse_content, str | list[Block])]
