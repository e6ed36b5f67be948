"""The parts of conversations in Anthropic's API: messages of blocks, as its clients send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.api.base.errors import quoted
from deployments.api.fields.content_parts import in_its_place, readable
from deployments.api.fields.field_values import other_than, taking
from deployments.api.fields.ignored import IgnoredFields
from deployments.api.fields.strict_model import LeftOut, StrictModel

_Role = Literal["user", "assistant", "system"]
_KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
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


class TextBlock(StrictModel):
    """Text. Other fields, such as `cache_control` and `citations`, label it."""

    type: Literal["text"]
    text: str


class OtherBlock(LeftOut):
    """A block that the model cannot read: a text replaces it, or it is omitted from an answer."""

    type: Annotated[str, other_than(*_KINDS)]


class OtherThanText(LeftOut):
    """A block that a text replaces where only text is allowed."""

    type: Annotated[str, other_than("text")]


class _ReadAsText(StrictModel):
    """A block that is read as its text; its other fields are omitted."""

    model_config = ConfigDict(extra="ignore")


class PartOfText(_ReadAsText):
    """A text within such a block."""

    type: Literal["text"]
    text: str


_AnyText = str | list[PartOfText]


class TextData(_ReadAsText):
    """A text as the source of a document."""

    type: Literal["text"]
    data: _AnyText


class TextContent(_ReadAsText):
    """Another source of a document that is text."""

    type: Annotated[Any, WithJsonSchema({"not": {"const": "text"}})] = None
    content: _AnyText


class TextDocument(_ReadAsText):
    """A document of text."""

    type: Literal["document"]
    source: TextData | TextContent


class SearchResult(_ReadAsText):
    """A result of a search."""

    type: Literal["search_result"]
    content: _AnyText


class ToolReference(_ReadAsText):
    """The name of a tool that a search has found."""

    type: Literal["tool_reference"]
    tool_name: _AnyText


_ReadBlock: TypeAlias = TextDocument | SearchResult | ToolReference
"""The blocks that `_text_in` reads, as /openapi.json describes them."""
Texts = str | list[TextBlock | _ReadBlock | OtherThanText] | None


class ToolUseBlock(StrictModel):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)


class ThinkingBlock(StrictModel):
    """The model's thoughts before its answer."""

    type: Literal["thinking"]
    thinking: str = ""


class RedactedThinkingBlock(StrictModel):
    """Thoughts of a model of Anthropic's, which only Anthropic can read."""

    type: Literal["redacted_thinking"]


def parse_system(value: object) -> object:
    """Return the system prompt without that by which no two requests of Claude Code would begin alike."""
    said = [text.partition("\n")[2] if text.startswith(_ATTRIBUTION) else text for text in _texts(value)]
    return "\n".join(text for text in said if text)


def _parse_result(value: object) -> object:
    return "\n".join(_texts(value))


def _texts(value: object) -> list[str]:
    """Return a string, or the texts of blocks of text; nothing is no text."""
    if isinstance(value, str) or value is None:
        return [value or ""]
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or an array of text blocks")
    texts = []
    for block in value:
        _check_kind(block)
        if not isinstance(text := block.get("text"), str):
            raise PydanticCustomError("content", 'must have blocks of the form {"type": "text", "text": "..."}')
        texts.append(text)
    return texts


def _check_kind(block: object) -> None:
    if _kind(block) is None:
        raise PydanticCustomError("content", "must hold blocks, which are objects with a type")


class ToolResultBlock(StrictModel):
    """The result of a call."""

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


def _parse_content(value: object) -> object:
    """Return a message's content as blocks; a string is one block of text."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or an array of blocks")
    for block in value:
        _check_kind(block)
    return value


def taken_message(given: object, ignored: IgnoredFields, path: str) -> object:
    """Return a message with blocks that the model can read: texts in place of images and documents.

    Blocks of an answer that only Anthropic's server writes, the calls and results of its own tools, are omitted,
    because a client must be able to send an answer back. `ignored` names all of these. Raises `ApiError` 400 where
    the setting refuses that.
    """
    content = given.get("content") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(content, list):
        return given
    blocks: list[object] = []
    for index, block in enumerate(content):
        kind, place = _kind(block), f"{path}.content.{index}"
        if kind == "tool_result":
            result = {"content": taken_texts(block.get("content"), ignored, f"{place}.content")}
            blocks.append({**block, **result})
        elif kind is not None and given.get("role") == "assistant" and _is_of_server(kind, block):
            ignored.leave_out(place, kind, f"is a block of the type {quoted(kind)}, which this server cannot use")
        else:
            blocks.append(_readable(block, ignored, place))
    return {**given, "content": blocks}


def _is_of_server(kind: str, block: Mapping[str, Any]) -> bool:
    """Whether only Anthropic's server writes this kind of block, which has no text for the model."""
    return kind not in (*_KINDS, "image", "document") and _text_in(kind, block) is None


def taken_texts(content: object, ignored: IgnoredFields, path: str) -> object:
    """Return a result or a system prompt as blocks of text. Tools that a search has found are named: the model is
    shown all of them.
    """
    if not isinstance(content, list):
        return content
    blocks = [_readable(block, ignored, f"{path}.{index}") for index, block in enumerate(content)]
    return readable(blocks, ignored, path)


def _readable(block: Any, ignored: IgnoredFields, path: str) -> object:
    """Return a block that the model can read."""
    kind = _kind(block)
    if kind is None or kind in _KINDS:
        return block
    text = _text_in(kind, block)
    return in_its_place(kind, ignored, path) if text is None else {"type": "text", "text": text}


def _text_in(kind: str, block: Mapping[str, Any]) -> str | None:
    """Return the text of a block of another type; None if it has more than text."""
    if kind == "tool_reference":
        content = block.get("tool_name")
    elif kind == "document":
        source = block.get("source")
        field = "data" if _kind(source) == "text" else "content"
        content = source.get(field) if isinstance(source, dict) else None
    else:
        content = block.get("content") if kind == "search_result" else None
    if isinstance(content, list) and all(_kind(part) == "text" for part in content):
        texts = [part.get("text") for part in content]
        return "\n".join(texts) if all(isinstance(text, str) for text in texts) else None
    return content if isinstance(content, str) else None


def _kind(block: object) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else None


class InputMessage(StrictModel):
    """One message of a conversation."""

    role: Annotated[_Role, one_of(*get_args(_Role))]
    content: Annotated[
        list[Block], FailFast(), taking(_parse_content, str | list[Block | _ReadBlock | OtherBlock])
    ]
