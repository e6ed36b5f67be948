"""Calls in Python's syntax: parsed, written, and as rules of a grammar. JSON's true, false and null are taken too.

Llama 3.2 and 4   [NAME(key="a text", other=[1, True, None]), ...]
OLMo 3            <function_calls>NAME(key="a text")
                  NAME(other=1)</function_calls>

Llama's list stands at the beginning of an answer, OLMo's marks anywhere; anything else is text.
"""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from typing import Any

import msgspec

from deployments.api.tools.llama3 import PYTHON_TAG
from deployments.api.tools.marked import parse_marked
from deployments.api.tools.named import Functions, arguments_of, object_of
from deployments.api.tools.scanner import Malformed, Scanner, is_json
from deployments.api.tools.segments import Parser, Segment
from engine.errors import InvalidGrammar
from engine.grammar.compiler import schema_in_lark
from engine.grammar.lark import SpecialId, separated

_START, _END = "<|python_start|>", "<|python_end|>"
MARKS = (PYTHON_TAG, _START, _END)
OPEN, CLOSE = "<function_calls>", "</function_calls>"
_TOKEN = re.compile(
    r"""\s+|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[-+]?(?:\d[\w.]*(?:(?<=[eE])[-+]\d+)?|\.\d\w*)|\w+|[\[\](){},:]""",
    re.DOTALL,
)
_NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BRACKETS = {"(": "[", ")": "]"}


def parse_pythonic(functions: Functions) -> Parser[None]:
    """Parse a list of calls of `functions`, and the text after it."""
    at = Scanner((_END,))
    yield from at.spaces()
    if (yield from at.mark(PYTHON_TAG, _START)):
        yield from at.spaces()
    has_called = False
    if (yield from at.look()) == "[":
        at.take()
        has_called = yield from _calls(at, functions)
    if not has_called:
        yield from at.release()
    while (yield from at.spaces()):
        if has_called and (yield from at.mark(_END)):
            at.drop()
        else:
            yield from at.text()
    if not has_called or at.held.strip():
        yield from at.release()


def parse_marked_pythonic(functions: Functions) -> Parser[None]:
    """Parse text, and calls of `functions` between marks, each on a line."""

    def calls(at: Scanner, opening: str) -> Parser[None]:
        yield from at.spaces()
        yield from _call(at, functions)
        with suppress(Malformed):
            while (yield from at.spaces()) not in ("<", ""):
                yield from _call(at, functions)

    return parse_marked((OPEN,), (CLOSE,), calls)


def _calls(at: Scanner, functions: Functions) -> Parser[bool]:
    """Parse calls up to the end of their list, or to what is no call. Returns whether there is one."""
    has_called = False
    while True:
        char = yield from at.spaces()
        if has_called and char == ",":
            at.take()
            char = yield from at.spaces()
        if has_called and char == "]":
            at.take()
            at.drop()
            return True
        try:
            yield from _call(at, functions)
        except Malformed:
            return has_called
        has_called = True


def _call(at: Scanner, functions: Functions) -> Parser[None]:
    """Parse one call, up to its bracket, or to a mark that ends it. Raises `Malformed` if it may be none."""
    name = (yield from _until(at, "(")).strip()
    if name not in functions:
        raise Malformed
    at.take()
    separator = "{"
    try:
        while (yield from at.spaces()) != ")" and not (yield from at.is_ended()):
            key = (yield from _until(at, "=")).strip()
            if not key.isidentifier():
                raise Malformed
            at.take()
            value = _as_json((yield from _literal(at)))
            at.drop()
            if separator == "{":
                yield Segment("call", name)
            yield Segment("arguments", f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
            separator = ", "
            if (yield from at.look()) == ",":
                at.take()
    except Malformed:
        if separator == "{":
            raise
        if not (yield from at.look()):
            at.drop()
        return
    if (yield from at.look()) == ")":
        at.take()
    at.drop()
    if separator == "{":
        yield Segment("call", name)
    yield Segment("arguments", "{}" if separator == "{" else "}")
    yield Segment("end")


def _until(at: Scanner, end: str) -> Parser[str]:
    """Take what comes before `end`, on one line. Raises `Malformed` if anything else than a word does."""
    word = ""
    while (char := (yield from at.look())) != end:
        if not char or char in "()[]{}<=,\n\"'":
            raise Malformed
        at.take()
        word += char
    return word


def _literal(at: Scanner) -> Parser[str]:
    """Take a value, up to the comma or the bracket after it. Raises `Malformed` at the end of the text."""
    taken, depth, quote, is_escaped = "", 0, "", False
    while True:
        char = yield from at.look()
        if not char:
            raise Malformed
        if not quote and ((depth == 0 and char in ",)") or (yield from at.is_ended())):
            return taken
        at.take()
        taken += char
        if quote:
            quote = quote if is_escaped or char != quote else ""
            is_escaped = char == "\\" and not is_escaped
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "([{") - (char in ")]}")


def _as_json(literal: str) -> str:
    """Return a literal of Python as JSON. Raises `Malformed` for anything else."""
    parts: list[str] = []
    end = 0
    for token in _TOKEN.finditer(literal):
        if token.start() != end:
            raise Malformed
        end = token.end()
        part = _token(token[0])
        if part in ("]", "}") and parts and parts[-1] == ",":
            parts.pop()
        if part:
            parts.append(part)
    if end != len(literal) or not is_json(" ".join(parts)):  # blanks, so that "1 2" and "1+2" are no 12
        raise Malformed
    return "".join(parts)


def _token(text: str) -> str:
    if text[0] in "\"'":
        return _text(text)
    if text[0].isdigit() or text[0] in "+-.":
        if is_json(text):
            return text
        try:
            return json.dumps(ast.literal_eval(text), allow_nan=False)
        except (ValueError, SyntaxError, MemoryError):
            raise Malformed from None
    return _NAMES.get(text) or _BRACKETS.get(text, text.strip())


def _text(quoted: str) -> str:
    """Return a text in Python's quotes as JSON. JSON's own texts stay as they are."""
    try:
        msgspec.json.decode(quoted)
        return quoted
    except msgspec.DecodeError:
        pass
    try:
        value = ast.literal_eval(quoted.replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\0"))
    except (ValueError, SyntaxError, MemoryError):
        raise Malformed from None
    whole = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.dumps(whole, ensure_ascii=False)


def written(arguments: str) -> str:
    """Write arguments, given as JSON, with Python's literals; those that are no object stay as they are."""
    values = object_of(arguments)
    if values is None:
        return arguments
    return ", ".join(f"{key}={_python(value)}" for key, value in values.items())


def _python(value: Any) -> str:
    """Write a value of JSON as Python does, but with JSON's quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(_python(one) for one in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_python(key)}: {_python(one)}' for key, one in value.items())}}}"
    return repr(value)


def argument_rules(name: str, schema: dict[str, Any], special: SpecialId) -> list[str]:
    """Return rules of a grammar for arguments; the first is called `name`. Raises InvalidGrammar."""
    arguments = arguments_of(schema) or []
    parts, values = [], []
    for number, argument in enumerate(arguments):
        if not argument.name.isidentifier():
            raise InvalidGrammar(
                f"the argument {argument.name!r} cannot be written in this model's format of calls"
            )
        parts.append((f'"{argument.name}=" {name}_value_{number}', argument.is_required))
        values.append(f"{name}_value_{number}: {schema_in_lark(argument.schema)}")
    return [*separated(name, parts, ", "), *values]
