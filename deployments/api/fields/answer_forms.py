"""The fields `response_format` and `structured_outputs`, and fields of the same form with other names."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from deployments.api.base.errors import quoted
from deployments.api.fields.strict_model import StrictModel
from deployments.api.fields.structural_tags import StructuralTag, Structure, TriggeredTags

FormatType = Literal["text", "json_object", "json_schema", "structural_tag"]
Schema = dict[str, Any] | bool
_Choices = Annotated[list[str], Field(min_length=1)] | None

STRUCTURED_OUTPUTS_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (False, True),
    "whitespace_pattern": (),
}
"""vLLM's keys that are not supported, with the values besides null that have no effect."""


def _parse_type(value: object) -> object:
    if value not in get_args(FormatType):
        known = "text, json_object, json_schema and structural_tag"
        raise PydanticCustomError("response_format", f"must be one of {known}, got {quoted(value)}")
    return value


def _parse_schema(value: object) -> object:
    if value is not None and not isinstance(value, dict | bool):
        raise PydanticCustomError("response_format", "must be a JSON schema: an object, or true")
    return value


def _parse_json(value: object) -> object:
    """Accept a schema or its text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError):
            raise PydanticCustomError(
                "structured_outputs", "must be a JSON schema, but this text is not JSON"
            ) from None
    return _parse_schema(value)


def _parse_choice(value: object) -> object:
    if value is None or (isinstance(value, list) and value and all(isinstance(choice, str) for choice in value)):
        return value
    raise PydanticCustomError("structured_outputs", "must be an array of at least one string")


def _parse_tag(value: object) -> object:
    """Accept a structural tag or its text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError):
            raise PydanticCustomError(
                "structured_outputs", "must be an object, but this text is not JSON"
            ) from None
    return value


class JsonSchemaFormat(StrictModel):
    """A schema with its name."""

    name: str
    """Labels it; changes nothing."""
    description: str | None = None
    """Labels it; changes nothing."""
    strict: bool | None = None
    """Changes nothing: answers always match."""
    schema_: Annotated[Any, BeforeValidator(_parse_schema, json_schema_input_type=Schema | None)] = Field(
        default=None, alias="schema"
    )
    """Without one, the answer is any JSON object."""


class ResponseFormat(StrictModel):
    """OpenAI's field for the format of an answer."""

    type: Annotated[FormatType, BeforeValidator(_parse_type)]
    json_schema: JsonSchemaFormat | None = None
    structures: list[Structure] | None = None
    """The tags of a `structural_tag` in vLLM's older form."""
    triggers: list[str] | None = None
    """Texts that begin tags."""
    format: TriggeredTags | None = None
    """A `structural_tag` in XGrammar's form."""


AnySchema = Annotated[Any, BeforeValidator(_parse_json, json_schema_input_type=Schema | str | None)]
"""A JSON schema, or its text."""
AnyChoice = Annotated[list[str] | None, BeforeValidator(_parse_choice, json_schema_input_type=_Choices)]


class StructuredOutputs(StrictModel):
    """vLLM's field for the format of an answer; exactly one key is allowed."""

    unsupported = STRUCTURED_OUTPUTS_UNSUPPORTED

    json_: AnySchema = Field(default=None, alias="json")
    """A JSON schema, or its text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole answer must match."""
    choice: AnyChoice = None
    """The answer is one of these."""
    grammar: str | None = None
    """A grammar in Lark's syntax, or in GBNF."""
    structural_tag: Annotated[
        StructuralTag | None, BeforeValidator(_parse_tag, json_schema_input_type=StructuralTag | str | None)
    ] = None
    """Text in which triggers begin tags with JSON, or its text."""
