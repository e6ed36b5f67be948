"""Turns `response_format` and `structured_outputs` into a checked `Grammar` that an answer must match."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from deployments.api.base.errors import ApiError, from_client, invalid
from deployments.api.base.field_checks import at_most, check_depth
from deployments.api.fields.answer_forms import ResponseFormat, StructuredOutputs
from deployments.api.fields.closed_objects import closed
from deployments.api.fields.protocol import ChatRequest, CompletionRequest
from deployments.api.fields.structural_tags import StructuralTag, tags_grammar
from deployments.api.served.served_model import GrammarChecker
from deployments.client.protocol import Overloaded
from deployments.config.limits import Limits
from engine.base.errors import InvalidGrammar
from engine.grammar.lark import SpecialId
from engine.grammar.spec import Grammar, GrammarKind
from engine.grammar.trial import TooComplex


async def requested_grammar(
    limits: Limits,
    checker: GrammarChecker | None,
    request: ChatRequest | CompletionRequest,
    special: SpecialId,
) -> Grammar | None:
    """Return the checked grammar that a request asks for, or None. Raises `ApiError` that names the field.

    `special` tells the special tokens that marks may be.
    """
    asked = [
        *_of_format(limits, request.response_format, special),
        *_of_structured(limits, request.structured_outputs, special),
        *_under_other_names(limits, request),
    ]
    if len(asked) > 1:
        names = " and ".join(param for _, param in asked)
        raise invalid(f"{names} cannot be combined; give only one of them.", asked[1][1])
    if not asked:
        return None
    grammar, param = asked[0]
    return await check_grammar(checker, grammar, param)


async def check_grammar(checker: GrammarChecker | None, grammar: Grammar, param: str) -> Grammar:
    """Return `grammar`, checked. Raises `ApiError` when a model's engines cannot enforce it; it came in `param`.

    Without a checker nothing is checked here, and the engines refuse grammars that they cannot enforce.
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
    if not isinstance(schema, dict):
        return grammar
    check_depth(limits, "max_schema_depth", schema, param)
    return (
        Grammar("json_schema", msgspec.json.encode(closed(schema)).decode()) if limits.closed_objects else grammar
    )


def unusable(param: str, error: InvalidGrammar) -> ApiError:
    """Create a 400 for a grammar that the engines cannot enforce."""
    bounds = " (limits.grammar_compile_s, limits.grammar_compile_bytes)" if isinstance(error, TooComplex) else ""
    return invalid(f"{param} cannot be used: {error}{bounds}.", param)


def _of_format(limits: Limits, given: ResponseFormat | None, special: SpecialId) -> Sequence[tuple[Grammar, str]]:
    if given is None:
        return []
    if given.type == "structural_tag":
        return [_of_tags(limits, given, "response_format", special)]
    for name in ("structures", "triggers", "format"):
        if getattr(given, name) is not None:
            raise invalid(f"{name} is only allowed when type is structural_tag.", f"response_format.{name}")
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


def _of_tags(
    limits: Limits, given: ResponseFormat | StructuralTag, param: str, special: SpecialId
) -> tuple[Grammar, str]:
    return tags_grammar(limits, given.structures, given.triggers, given.format, param, special), param


def _of_structured(
    limits: Limits, given: StructuredOutputs | None, special: SpecialId
) -> Sequence[tuple[Grammar, str]]:
    if given is None:
        return []
    asked = []
    if given.json_ is not None:
        asked.append((schema_grammar(limits, given.json_, "structured_outputs.json"), "structured_outputs.json"))
    if given.json_object:
        asked.append((Grammar("json_object"), "structured_outputs.json_object"))
    if given.regex is not None:
        asked.append((_of_regex(limits, given.regex, "structured_outputs.regex"), "structured_outputs.regex"))
    if given.choice is not None:
        asked.append((_of_choice(limits, given.choice, "structured_outputs.choice"), "structured_outputs.choice"))
    if given.grammar is not None:
        asked.append(
            (_of_rules(limits, given.grammar, "structured_outputs.grammar"), "structured_outputs.grammar")
        )
    if given.structural_tag is not None:
        asked.append(_of_tags(limits, given.structural_tag, "structured_outputs.structural_tag", special))
    if not asked:
        raise invalid(
            "structured_outputs needs one of json, json_object, regex, choice, grammar or structural_tag.",
            "structured_outputs",
        )
    return asked


def _under_other_names(limits: Limits, request: ChatRequest | CompletionRequest) -> Sequence[tuple[Grammar, str]]:
    return [
        (make(limits, given, name), name)
        for name, make in _OTHER_NAMES.items()
        if (given := getattr(request, name)) is not None
    ]


def _of_regex(limits: Limits, given: str, param: str) -> Grammar:
    at_most(limits, "max_regex_chars", param, len(given), "characters")
    return _sized(limits, "regex", given, param)


def _of_choice(limits: Limits, given: list[str], param: str) -> Grammar:
    at_most(limits, "max_grammar_choices", param, len(given), "choices")
    return _sized(limits, "choice", json.dumps(given, ensure_ascii=False), param)


def _of_rules(limits: Limits, given: str, param: str) -> Grammar:
    return _sized(limits, "gbnf" if "::=" in given else "lark", given, param)


def _sized(limits: Limits, kind: GrammarKind, source: str, param: str) -> Grammar:
    at_most(limits, "max_grammar_bytes", param, len(source.encode()), "bytes")
    return Grammar(kind, source)


_OTHER_NAMES: Mapping[str, Callable[[Limits, Any, str], Grammar]] = MappingProxyType(
    {
        "guided_json": schema_grammar,
        "json_schema": schema_grammar,
        "guided_regex": _of_regex,
        "regex": _of_regex,
        "guided_choice": _of_choice,
        "guided_grammar": _of_rules,
        "ebnf": _of_rules,
    }
)
"""vLLM's older fields and SGLang's."""
