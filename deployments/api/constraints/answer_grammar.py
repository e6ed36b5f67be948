"""Builds the grammar of a whole answer in llguidance's Lark syntax, with JSON schemas embedded.

    start:    thoughts? ( call (SEPARATOR call)* )             a call is required
    start:    thoughts? ( call (SEPARATOR call)* | answer )    calls are optional, and other answers have a schema
    start:    thoughts? ( free call )* text                    calls are optional but have schemas (`strict`)

Rules name special tokens by their ids, because no text matches them.
"""

from __future__ import annotations

from typing import Any

from deployments.api.base import exact_json
from deployments.api.constraints.channels import channel_rules
from deployments.api.constraints.thinking_budget import ThinkingBudget
from deployments.api.dialects.reasoning import Channels
from deployments.api.dialects.tool_format import NUMBER
from deployments.api.fields.closed_objects import closed
from deployments.api.fields.tools import Function
from deployments.api.output.output_parser import OutputParseSpec
from deployments.api.prompt.requested_tools import RequestedTools
from engine.grammar.compiler import schema_in_lark
from engine.grammar.lark import SpecialId, literal, up_to_mark
from engine.grammar.spec import Grammar
from engine.grammar.texts import ANY_TEXT

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def answer_grammar(
    schema: dict[str, Any] | None,
    tools: RequestedTools | None,
    spec: OutputParseSpec,
    special: SpecialId,
    budget: ThinkingBudget | None = None,
) -> Grammar:
    """Return the grammar of an answer that matches `schema` or calls `tools`. Raises InvalidGrammar.

    Without either, the answer is any text that `budget` allows.
    """
    answer = None if schema is None else schema_in_lark(schema)
    if answer is None and tools is None and budget is not None:
        answer = budget.anything
    if isinstance(spec.thoughts, Channels):
        return _in_channels(spec.thoughts, answer, tools, special, budget)
    body, rules = ("answer", []) if tools is None else _calls(tools, answer, special)
    if answer is not None:
        rules.append(f"answer: {answer}")
    return Grammar("lark", "\n".join([_start(body, spec, special, budget), *rules]))


def _in_channels(
    thoughts: Channels,
    answer: str | None,
    tools: RequestedTools | None,
    special: SpecialId,
    budget: ThinkingBudget | None,
) -> Grammar:
    calls, rules = (None, []) if tools is None else _block(tools, answer, special, "")
    if answer is not None:
        rules.append(f"answer: {answer}")
    start = channel_rules(
        calls,
        None if answer is None else "answer",
        is_forced=tools is not None and tools.is_forced,
        literal=lambda text: literal(text, thoughts.marks, special),
        has_specials=special(thoughts.closes) is not None,
        budget=budget,
    )
    return Grammar("lark", "\n".join([*start, *rules]))


def arguments_schema(function: Function, closes_objects: bool) -> dict[str, Any]:
    """Return the schema of a function's arguments, which must be an object in any case."""
    if function.parameters is None:
        return _NO_ARGUMENTS
    schema = {**exact_json.plain(function.parameters), "type": "object"}
    found: dict[str, Any] = closed(schema) if closes_objects else schema
    return found


def _start(body: str, spec: OutputParseSpec, special: SpecialId, budget: ThinkingBudget | None) -> str:
    if spec.thoughts is None:
        return f"start: {body}"
    if budget is not None:
        begin = budget.thoughts if spec.is_thinking else f"({budget.opened} {budget.thoughts} GAP)?"
        return f"start: {begin}{' GAP' if spec.is_thinking else ''} ({body})\n{budget.rules}\nGAP: /\\n{{0,2}}/"
    opens = spec.thoughts.opens
    inside = up_to_mark("inside", spec.thoughts.closes, special)
    opened = f"({literal(opens + spec.thoughts.label, (opens,), special)} inside GAP)?"
    return f"start: {'inside GAP' if spec.is_thinking else opened} ({body})\n{inside}\nGAP: /\\n{{0,2}}/"


def _calls(tools: RequestedTools, answer: str | None, special: SpecialId) -> tuple[str, list[str]]:
    """Return the body of an answer with calls, and the rules it needs."""
    form = tools.format
    is_free = not tools.is_forced and answer is None and form.begins != ""
    mark = form.begins if is_free else ""
    block, rules = _block(tools, answer, special, mark)
    if tools.is_forced:
        return block, rules
    if answer is not None:
        return f"{block} | answer", rules
    if is_free:
        free = up_to_mark("free", mark, special)
        return f"(free {block if form.opens else 'call'})* text", [*rules, free, f"text: {ANY_TEXT}"]
    return f"{block} | TEXT", [*rules, rf"TEXT: /([^\s\{form.initial}](?s:.*))?/"]


def _block(tools: RequestedTools, answer: str | None, special: SpecialId, mark: str) -> tuple[str, list[str]]:
    """Return the block of an answer's calls, without the `mark` that comes before, and the rules it needs."""
    form = tools.format
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools.callable)))]
    for index, function in enumerate(tools.callable):
        if answer is not None and form.key is not None:
            rules.append(f"call_{index}: {schema_in_lark(_call_schema(function, form.key, tools.closes_objects))}")
            continue
        before, *after_number = form.heads(function.name)
        heads = [before.removeprefix("" if form.opens else mark), *after_number]
        head = " NUMBER ".join(literal(part, form.marks, special) for part in heads)
        parts = [head, f"args_{index}", literal(form.tail, form.marks, special)]
        rules.append(f"call_{index}: {' '.join(parts)}")
        schema = arguments_schema(function, tools.closes_objects)
        rule = f"args_{index}"
        rules += form.rules(rule, schema, special) if form.rules else [f"{rule}: {schema_in_lark(schema)}"]
    if NUMBER in form.head:
        rules.append("NUMBER: /[0-9]{1,4}/")
    several = "call" if tools.is_single else f"call ({literal(form.separator, form.marks, special)} call)*"
    opens, closes = (literal(part, form.marks, special) for part in (form.opens.removeprefix(mark), form.closes))
    return f"{opens} {several} {closes}".strip(), rules


def _call_schema(function: Function, key: str, closes_objects: bool) -> dict[str, Any]:
    """Return the schema of a whole call, if only schemas distinguish it from an answer. Keeps definitions in
    place."""
    schema = arguments_schema(function, closes_objects)
    definitions: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    properties = {"name": {"const": function.name}, key: schema}
    closed = {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
    return {**definitions, **closed}
