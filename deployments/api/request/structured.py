"""Turns `response_format` and `structured_outputs` into a checked `Grammar` that an answer must match."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from deployments.api.errors import ApiError, at_most, from_client, invalid, quoted
from deployments.api.http.body import check_depth
from deployments.api.request.strict_model import StrictModel
from deployments.client.protocol import Overloaded
from deployments.config.limits import Limits
from engine.errors import InvalidGrammar
from engine.grammar.spec import Grammar, GrammarKind
from engine.grammar.trial import TooComplex

FormatType = Literal["text", "json_object", "json_schema"]
Schema = dict[str, Any] | bool
_Choices = Annotated[list[str], Field(min_length=1)] | None

STRUCTURED_OUTPUTS_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (False, True),
    "structural_tag": (),
    "whitespace_pattern": (),
}
"""vLLM's keys that are not supported, with the values besides null that have no effect."""


class GrammarChecker(Protocol):
    """Checks whether a model's engines can enforce a grammar."""

    async def check(self, grammar: Grammar) -> Grammar:
        """Return the grammar, and what was learnt of it, if they can.

        Raises InvalidGrammar, or Overloaded when too many checks are waiting.
        """
        ...


def _parse_type(value: object) -> object:
    if value not in ("text", "json_object", "json_schema"):
        raise PydanticCustomError(
            "response_format", f"must be one of text, json_object and json_schema, got {quoted(value)}"
        )
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
    """OpenAI's field for what an answer must match."""

    type: Annotated[FormatType, BeforeValidator(_parse_type)]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(StrictModel):
    """vLLM's field for what an answer must match; exactly one key is allowed."""

    json_: Annotated[Any, BeforeValidator(_parse_json, json_schema_input_type=Schema | str | None)] = Field(
        default=None, alias="json"
    )
    """A JSON schema, or its text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole answer must match."""
    choice: Annotated[list[str] | None, BeforeValidator(_parse_choice, json_schema_input_type=_Choices)] = None
    """The answer is one of these."""
    grammar: str | None = None
    """A grammar in Lark's syntax."""


async def requested_grammar(
    limits: Limits,
    checker: GrammarChecker | None,
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
) -> Grammar | None:
    """Return the checked grammar that a request asks for, or None. Raises `ApiError` that names the field."""
    asked = [*_of_format(limits, response_format), *_of_structured(limits, structured_outputs)]
    if len(asked) > 1:
        names = " and ".join(param for _, param in asked)
        raise invalid(f"{names} exclude each other; give only one of them.", asked[1][1])
    if not asked:
        return None
    return await check_grammar(checker, *asked[0])


async def check_grammar(checker: GrammarChecker | None, grammar: Grammar, param: str) -> Grammar:
    """Return `grammar`, checked. Raises `ApiError` when a model's engines cannot enforce it; it came in `param`.

    Without a checker nothing is checked here, and the engines refuse what they cannot do.
    """
    if checker is None:
        return grammar
    try:
        return await checker.check(grammar)
    except InvalidGrammar as error:
        raise unusable(param, error) from None
    except Overloaded as error:
        raise from_client(error, "") from None


def schema_grammar(limits: Limits, schema: object, param: str) -> Grammar:
    """Return the grammar of a JSON schema that came in field `param`. Raises `ApiError` if it is too large."""
    grammar = _sized(limits, "json_schema", msgspec.json.encode(schema).decode(), param)
    if isinstance(schema, dict):
        check_depth(limits, "max_schema_depth", schema, param)
    return grammar


def unusable(param: str, error: InvalidGrammar) -> ApiError:
    """Create a 400 for a grammar that the engines cannot enforce."""
    bounds = " (limits.grammar_compile_s, limits.grammar_compile_bytes)" if isinstance(error, TooComplex) else ""
    return invalid(f"{param} cannot be used: {error}{bounds}.", param)


def _of_format(limits: Limits, given: ResponseFormat | None) -> Sequence[tuple[Grammar, str]]:
    if given is None:
        return []
    if given.type != "json_schema":
        if given.json_schema is not None:
            raise invalid("json_schema is only allowed when type is json_schema.", "response_format.json_schema")
        return [(Grammar("json_object"), "response_format")] if given.type == "json_object" else []
    if given.json_schema is None:
        raise invalid("response_format.json_schema is required by this type.", "response_format.json_schema")
    param = "response_format.json_schema.schema"
    if given.json_schema.schema_ is None:
        return [(Grammar("json_object"), param)]
    return [(schema_grammar(limits, given.json_schema.schema_, param), param)]


def _of_structured(limits: Limits, given: StructuredOutputs | None) -> Sequence[tuple[Grammar, str]]:
    if given is None:
        return []
    asked = []
    if given.json_ is not None:
        asked.append((schema_grammar(limits, given.json_, "structured_outputs.json"), "structured_outputs.json"))
    if given.json_object:
        asked.append((Grammar("json_object"), "structured_outputs.json_object"))
    if given.regex is not None:
        param = "structured_outputs.regex"
        at_most(limits, "max_regex_chars", param, len(given.regex), "characters")
        asked.append((_sized(limits, "regex", given.regex, param), param))
    if given.choice is not None:
        param = "structured_outputs.choice"
        at_most(limits, "max_grammar_choices", param, len(given.choice), "choices")
        asked.append((_sized(limits, "choice", json.dumps(given.choice, ensure_ascii=False), param), param))
    if given.grammar is not None:
        param = "structured_outputs.grammar"
        asked.append((_sized(limits, "lark", given.grammar, param), param))
    if not asked:
        raise invalid(
            "structured_outputs needs one of json, json_object, regex, choice or grammar.", "structured_outputs"
        )
    return asked


def _sized(limits: Limits, kind: GrammarKind, source: str, param: str) -> Grammar:
    at_most(limits, "max_grammar_bytes", param, len(source.encode()), "bytes")
    return Grammar(kind, source)
