"""Builds the grammar of a whole answer in llguidance's Lark syntax, with JSON schemas embedded.

    start:    thoughts? ( call (SEPARATOR call)* )             a call is required
    start:    thoughts? ( call (SEPARATOR call)* | answer )    calls are optional, and other answers have a schema
    start:    thoughts? ( free call )* text                    calls are optional but have schemas (`strict`)

Special tokens are referred to by name, because no text matches them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from deployments.api.output.output_parser import OutputParseSpec
from deployments.api.output.reasoning import CLOSE, OPEN
from deployments.api.output.thinking_budget import ThinkingBudget
from deployments.api.request.closed_objects import closed
from deployments.api.tools.protocol import Function
from deployments.api.tools.requested import RequestedTools
from engine.grammar.compiler import schema_in_lark
from engine.grammar.spec import Grammar

_ANYTHING = "/(?s:.*)/"
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def answer_grammar(
    schema: dict[str, Any] | None,
    tools: RequestedTools | None,
    spec: OutputParseSpec,
    is_special: Callable[[str], bool],
    budget: ThinkingBudget | None = None,
) -> Grammar:
    """Return the grammar of an answer that matches `schema` or calls `tools`. Raises InvalidGrammar.

    Without either, the answer is anything, and `budget` is what bounds it.
    """
    answer = None if schema is None else schema_in_lark(schema)
    if answer is None and tools is None and budget is not None:
        answer = budget.anything
    body, rules = ("answer", []) if tools is None else _calls(tools, answer, is_special)
    if answer is not None:
        rules.append(f"answer: {answer}")
    return Grammar("lark", "\n".join([_start(body, spec, is_special, budget), *rules]))


def arguments_schema(function: Function, closes_objects: bool) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object whatever else the schema says."""
    if function.parameters is None:
        return _NO_ARGUMENTS
    schema = {**function.parameters, "type": "object"}
    found: dict[str, Any] = closed(schema) if closes_objects else schema
    return found


def _start(
    body: str, spec: OutputParseSpec, is_special: Callable[[str], bool], budget: ThinkingBudget | None
) -> str:
    if not spec.thinks:
        return f"start: {body}"
    if budget is not None:
        begin = budget.thoughts if spec.is_thinking else f"({budget.opened} {budget.thoughts} GAP)?"
        return f"start: {begin}{' GAP' if spec.is_thinking else ''} ({body})\n{budget.rules}\nGAP: /\\n{{0,2}}/"
    if is_special(CLOSE):
        inside = f"inside: {_ANYTHING} {CLOSE}"
    else:
        inside = f"inside[lazy]: /(?s:.*){CLOSE.replace('/', chr(92) + '/')}/"
    opened = f"({_literal(OPEN, (OPEN,), is_special)} inside GAP)?"
    return f"start: {'inside GAP' if spec.is_thinking else opened} ({body})\n{inside}\nGAP: /\\n{{0,2}}/"


def _calls(tools: RequestedTools, answer: str | None, is_special: Callable[[str], bool]) -> tuple[str, list[str]]:
    """Return the body of an answer with calls, and the rules it needs."""
    form = tools.format
    mark = form.opens.strip()
    is_free = not tools.is_forced and answer is None and mark != ""
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools.callable)))]
    for index, function in enumerate(tools.callable):
        if answer is not None and not mark:
            rules.append(f"call_{index}: {schema_in_lark(_call_schema(function, form.key, tools.closes_objects))}")
            continue
        head = f'{form.opens}{{"name": "{function.name}", "{form.key}": '.removeprefix(mark if is_free else "")
        before, after = (_literal(text, form.marks, is_special) for text in (head, f"}}{form.closes}"))
        rules += [
            f"call_{index}: {before} args_{index} {after}",
            f"args_{index}: {schema_in_lark(arguments_schema(function, tools.closes_objects))}",
        ]
    several = "call" if tools.is_single else f"call ({_literal(form.separator, form.marks, is_special)} call)*"
    if tools.is_forced:
        return several, rules
    if answer is not None:
        return f"{several} | answer", rules
    if is_free:
        free = f"free: {_ANYTHING} {mark}" if is_special(mark) else f"free[lazy]: /(?s:.*){mark}/"
        return "(free call)* text", [*rules, free, f"text: {_ANYTHING}"]
    return f"{several} | TEXT", [*rules, r"TEXT: /([^\s{](?s:.*))?/"]


def _call_schema(function: Function, key: str, closes_objects: bool) -> dict[str, Any]:
    """Return the schema of a whole call, where only schemas tell it from an answer. Keeps definitions in place."""
    schema = arguments_schema(function, closes_objects)
    definitions: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    properties = {"name": {"const": function.name}, key: schema}
    closed = {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
    return {**definitions, **closed}


def _literal(text: str, marks: tuple[str, ...], is_special: Callable[[str], bool]) -> str:
    """Return `text` in Lark's syntax, referring by name to those of `marks` that are special tokens."""
    for mark in marks:
        if mark in text and is_special(mark):
            before, _, after = text.partition(mark)
            parts = [_literal(part, marks, is_special) if part else "" for part in (before, after)]
            return f"{parts[0]} {mark} {parts[1]}".strip()
    return json.dumps(text, ensure_ascii=False)
