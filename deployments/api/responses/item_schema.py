"""The items that a conversation takes, as /openapi.json describes them; `items.py` checks them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from deployments.api.fields.field_values import other_than
from deployments.api.fields.protocol import AnyPart
from deployments.api.fields.strict_model import LeftOut, StrictModel
from deployments.api.responses.items import KNOWN


class TextOfReasoning(StrictModel):
    """A text of the model's thoughts, or a summary. Only the text is read."""

    model_config = ConfigDict(extra="allow")

    text: str


class _Named(StrictModel):
    id: str | None = None


class MessageToModel(_Named):
    """A message to the model."""

    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer"]
    content: str | Annotated[list[AnyPart], Field(min_length=1)]


class MessageOfModel(_Named):
    """A message of the model's."""

    type: Literal["message"] | None = None
    role: Literal["assistant"]
    content: str | list[AnyPart] | None = None


class _OfCall(_Named):
    call_id: str


class FunctionCall(_OfCall):
    """A call of a function."""

    type: Literal["function_call"]
    name: str
    namespace: str | None = None
    arguments: str | None = None


class CustomToolCall(_OfCall):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    name: str
    namespace: str | None = None
    input: str | None = None


class ToolResult(_OfCall):
    """The result of a called function or tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    output: str | list[AnyPart] | None = None


class Reasoning(_Named):
    """The model's thoughts."""

    type: Literal["reasoning"]
    summary: list[TextOfReasoning] | None = None
    content: list[TextOfReasoning] | None = None


class ItemReference(StrictModel):
    """A stored item, by its name."""

    type: Literal["item_reference"]
    id: str


class ItemName(StrictModel):
    """The same in its shorter form."""

    model_config = ConfigDict(json_schema_extra={"not": {"required": ["role"]}})

    type: None = None
    id: str


class OtherItem(LeftOut):
    """An item that this server cannot use."""

    type: Annotated[str, other_than(*KNOWN)]


AnyItem = (
    MessageToModel
    | MessageOfModel
    | FunctionCall
    | CustomToolCall
    | ToolResult
    | Reasoning
    | ItemReference
    | ItemName
    | OtherItem
)
