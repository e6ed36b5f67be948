"""The items that a conversation takes, as /openapi.json describes them; `items.py` checks them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from deployments.api.request.strict_model import LenientModel


class TextOfMessage(LenientModel):
    """A text in a message, or in a function's result."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(LenientModel):
    """A text with which an answer refuses."""

    type: Literal["refusal"]
    refusal: str


class TextOfReasoning(LenientModel):
    """A text that the model thought, or what sums it up."""

    text: str


_Content = str | Annotated[list[TextOfMessage | RefusalPart], Field(min_length=1)]


class _Named(LenientModel):
    id: str | None = None


class MessageToModel(_Named):
    """A message to the model."""

    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer"]
    content: _Content


class MessageOfModel(_Named):
    """A message of the model's."""

    type: Literal["message"] | None = None
    role: Literal["assistant"]
    content: str | list[TextOfMessage | RefusalPart] | None = None


class FunctionCall(_Named):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | None = None


class FunctionResult(_Named):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextOfMessage | RefusalPart] | None = None


class Reasoning(_Named):
    """What the model thought."""

    type: Literal["reasoning"]
    summary: list[TextOfReasoning] | None = None
    content: list[TextOfReasoning] | None = None


KeptItem = MessageToModel | MessageOfModel | FunctionCall | FunctionResult | Reasoning
