"""Calls as Qwen3-Coder writes them, in marks of its own: parsed, written, and as rules of a grammar.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    a text as it is, or JSON
    </parameter>
    </function>
    </tool_call>

A value is a text where its schema allows nothing else. Elsewhere it is JSON, or a text if it is not.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec

from deployments.api.tools.hermes import OPEN, parse_marked
from deployments.api.tools.named import Functions, arguments_of, kind_of, kinds, object_of, properties
from deployments.api.tools.scanner import Malformed, Scanner
from deployments.api.tools.segments import Parser, Segment
from engine.errors import InvalidGrammar
from engine.grammar.compiler import schema_in_lark

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_FUNCTION, _END_PARAMETER = "</function>", "</parameter>"
_END_IN_REGEX = r"\n?<\/parameter>"
_LINE = json.dumps("\n")
_PYTHONS = {"True": "true", "False": "false", "None": "null"}
_JUST_TEXT, _TEXT_OR_NULL = frozenset({"string"}), frozenset({"string", "null"})


def parse_coder(functions: Functions) -> Parser[None]:
    """Parse text, and calls of `functions`.

    The outer marks may be missing, as the model sometimes leaves them out.
    """

    def call(at: Scanner, opening: str) -> Parser[bool]:
        if opening == OPEN:
            yield from at.spaces()
            if not (yield from at.mark(_FUNCTION)):
                raise Malformed
        return (yield from _call(at, functions))

    return parse_marked((OPEN, _FUNCTION), call)


def _call(at: Scanner, functions: Functions) -> Parser[bool]:
    """Parse a call after its first mark. Returns whether it is complete; raises `Malformed` for unknown names."""
    name = yield from _word(at)
    if name not in functions:
        raise Malformed
    at.drop()
    yield Segment("call", name)
    schema, separator = functions[name] or {}, "{"
    while True:
        yield from at.spaces()
        found = yield from at.mark(_PARAMETER, _END_FUNCTION)
        if found == _END_FUNCTION:
            at.drop()
            yield Segment("arguments", "}" if separator != "{" else "{}")
            yield Segment("end")
            return True
        if not found:
            return False
        try:
            key = yield from _word(at)
        except Malformed:
            return False
        if (yield from at.look()) == "\n":
            at.take()
        at.drop()
        yield Segment("arguments", f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        if not (yield from _value(at, kinds(properties(schema).get(key, {}), schema))):
            return False


def _word(at: Scanner) -> Parser[str]:
    """Take what comes before the mark's end, and that. Raises `Malformed` at the end of a line."""
    word = ""
    while (char := (yield from at.look())) != ">":
        if not char or char == "\n":
            raise Malformed
        at.take()
        word += char
    at.take()
    return word


def _value(at: Scanner, allowed: frozenset[str]) -> Parser[bool]:
    """Parse a value and its closing mark, and yield it as JSON; a text as it arrives. False if the text ended."""
    parts: list[str] = []
    is_text = allowed == _JUST_TEXT
    if is_text:
        yield Segment("arguments", '"')
    elif (yield from at.look()) in ("{", "[", '"'):  # in JSON, the mark may be part of a text
        with contextlib.suppress(Malformed):
            yield from at.value(shown=False)
        parts.append(at.held)
        at.drop()
    while not (yield from at.mark(f"\n{_END_PARAMETER}", _END_PARAMETER)):
        if not at.held:
            if not (yield from at.look()):
                return False
            at.take()
        if is_text:
            yield Segment("arguments", json.dumps(at.held, ensure_ascii=False)[1:-1])
        parts.append(at.held)
        at.drop()
    at.drop()
    yield Segment("arguments", '"' if is_text else _as_json("".join(parts), allowed))
    return True


def _as_json(text: str, allowed: frozenset[str]) -> str:
    """Return a value as JSON: as it is written if that is JSON of an allowed type, or a text."""
    written = _PYTHONS.get(text.strip(), text.strip())
    try:
        value = msgspec.json.decode(written)
    except (msgspec.DecodeError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    is_meant = kind_of(value) in allowed and (kind_of(value) != "string" or allowed != _TEXT_OR_NULL)
    return written if is_meant or "string" not in allowed else json.dumps(text, ensure_ascii=False)


def written(arguments: str) -> str:
    """Write arguments, given as JSON; those that are no object stay as they are."""
    values = object_of(arguments)
    if values is None:
        return arguments
    texts = {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in values.items()
    }
    return "".join(f"{_PARAMETER}{key}>\n{text}\n{_END_PARAMETER}\n" for key, text in texts.items())


def argument_rules(name: str, schema: dict[str, Any]) -> list[str]:
    """Return rules of a grammar for arguments; the first is called `name`. Raises InvalidGrammar."""
    arguments = arguments_of(schema)
    if arguments is None:
        free = rf'"{_PARAMETER}" /[^<>\n]+/ ">\n" {name}_any'
        return [
            f"{name}: ({free})*",
            f"{name}_any: {name}_text {_LINE}",
            f"{name}_text[lazy]: /(?s:.*){_END_IN_REGEX}/",
        ]
    parts, rules = [], []
    for number, argument in enumerate(arguments):
        if set(argument.name) & set("<>\n") or not argument.name:
            raise InvalidGrammar(
                f"the argument {argument.name!r} cannot be written in this model's format of calls"
            )
        rule = f"{name}_{number}"
        parts.append(rule if argument.is_required else f"{rule}?")
        head = json.dumps(f"{_PARAMETER}{argument.name}>\n", ensure_ascii=False)
        rules += [f"{rule}: {head} {rule}_value", *_value_rules(f"{rule}_value", argument.schema)]
    return [f"{name}: {' '.join(parts) or chr(34) * 2}", *rules]


def _value_rules(rule: str, schema: dict[str, Any]) -> list[str]:
    """Return rules for a value and the mark that ends it."""
    allowed, end = kinds(schema, schema), json.dumps(f"\n{_END_PARAMETER}\n")
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not allowed <= _TEXT_OR_NULL:
        return [f"{rule}: {rule}_json {end}", f"{rule}_json: {schema_in_lark(schema)}"]
    if isinstance(choices, list):
        texts = ("null" if choice is None else str(choice) for choice in choices)
        return [f"{rule}: ({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}) {end}"]
    if allowed == {"null"}:
        return [f'{rule}: "null" {end}']
    if "pattern" in schema:
        raise InvalidGrammar("pattern is not supported, because this model writes texts without quotes")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    count = "*" if not least and most == "" else f"{{{least},{most}}}"
    return [f"{rule}: {rule}_text {_LINE}", f"{rule}_text[lazy]: /(?s:.{count}){_END_IN_REGEX}/"]
