"""Combines tools, response_format and reasoning into a parse spec and the grammar that an answer must match."""

from __future__ import annotations

import json
from typing import Any

from deployments.api.base import exact_json
from deployments.api.base.errors import from_client, invalid
from deployments.api.base.field_checks import at_most
from deployments.api.constraints.answer_grammar import answer_grammar, arguments_schema
from deployments.api.constraints.structured import check_grammar, unusable
from deployments.api.constraints.thinking_budget import ThinkingBudget
from deployments.api.output.output_parser import PLAIN_TEXT, OutputParseSpec
from deployments.api.prompt.requested_tools import RequestedTools
from deployments.api.served.served_model import ServedModel
from deployments.api.served.text_codec import TextCodec
from deployments.client.protocol import Overloaded
from deployments.config.limits import Limits
from engine.base.errors import InvalidGrammar
from engine.grammar.spec import Grammar
from engine.grammar.trial import TooComplex

_MARK_TOKENS = 16
"""Upper bound on a tokenizer's tokens for a mark and the white space after it."""


async def answer_constraint(
    limits: Limits,
    served: ServedModel,
    form: Grammar | None,
    tools: RequestedTools | None,
    prompt_ids: list[int],
    budget: ThinkingBudget | None = None,
) -> tuple[OutputParseSpec, Grammar | None]:
    """Return the parse spec of an answer, and the grammar that it must match, if any.

    `form` is the checked grammar that the client asked for. A JSON grammar covers the answer after reasoning and
    calls; any other covers the whole text. `budget` bounds the reasoning. Raises `ApiError` 400 for tools that
    cannot be combined with `form`, and for schemas that cannot be enforced.
    """
    spec = _parse_spec(served.codec, tools, prompt_ids)
    held = tools if tools and (tools.is_forced or tools.is_strict or form) else None
    if form is not None and form.kind not in ("json_schema", "json_object"):
        if held is not None:
            raise invalid("tools can be combined only with JSON output; leave out the other format.", "tools")
        return PLAIN_TEXT, form
    if held is not None:
        return spec, await _calls_grammar(limits, served, _schema(form), held, spec, budget)
    if (form is not None and spec.thoughts is not None) or budget is not None:
        return spec, answer_grammar(_schema(form), None, spec, served.codec.special_id, budget)
    return spec, form


def _parse_spec(codec: TextCodec, tools: RequestedTools | None, prompt_ids: list[int]) -> OutputParseSpec:
    """Return the parse spec of an answer. Some templates begin the reasoning in the prompt."""
    thoughts, is_thinking = codec.dialect.thoughts, False
    if thoughts is not None:
        begun = codec.decode(prompt_ids[-_MARK_TOKENS:]).rstrip()
        is_thinking = begun.removesuffix(thoughts.label.rstrip()).endswith(thoughts.opens)
    if tools is None:
        return OutputParseSpec(thoughts, is_thinking)
    customs = tools.offered.customs
    return OutputParseSpec(thoughts, is_thinking, tools.format, tools.schemas, customs, tools.is_single)


async def _calls_grammar(
    limits: Limits,
    served: ServedModel,
    schema: dict[str, Any] | None,
    tools: RequestedTools,
    spec: OutputParseSpec,
    budget: ThinkingBudget | None,
) -> Grammar:
    """Return the grammar of an answer with calls. Raises `ApiError`, for the function at fault if one is."""
    unit = "bytes that calls must match"
    schemas = sum(len(exact_json.encode(function.parameters)) for function in tools.callable)
    at_most(
        limits, "max_grammar_bytes", "tools", schemas, unit
    )  # The grammar is larger, and takes longer to make.
    try:
        grammar = answer_grammar(schema, tools, spec, served.codec.special_id, budget)
        at_most(limits, "max_grammar_bytes", "tools", len(grammar.source.encode()), unit)
        return grammar if served.grammars is None else await served.grammars.check(grammar)
    except InvalidGrammar as error:
        if not isinstance(error, TooComplex):  # Checking each function might take as long.
            await _blame(served, tools)
        raise unusable("tools", error) from None
    except Overloaded as error:
        raise from_client(error, "") from None


async def _blame(served: ServedModel, tools: RequestedTools) -> None:
    """Raise `ApiError` for the first function whose schema cannot be enforced, if there is one."""
    for function in tools.callable:
        single = Grammar("json_schema", json.dumps(arguments_schema(function, tools.closes_objects)))
        await check_grammar(served.grammars, single, f"{tools.offered.places[function.name]}.parameters")


def _schema(form: Grammar | None) -> dict[str, Any] | None:
    """Return the JSON schema that `form` stands for."""
    if form is None:
        return None
    schema = json.loads(form.source or '{"type": "object"}')
    return schema if isinstance(schema, dict) else {}
