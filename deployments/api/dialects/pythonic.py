"""Calls in Python's syntax: parsed, written, and as rules of a grammar. JSON's true, false and null are accepted
too.

Llama 3.2 and 4   [NAME(key="a text", other=[1, True, None]), ...]
OLMo 3            <function_calls>NAME(key="a text")
                  NAME(other=1)</function_calls>

Llama's list is at the beginning of an answer or after a mark, OLMo's marks are anywhere; other text is text.

A key may come twice. The first value has been sent by then, so it stays, and another one is text after the call.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from deployments.api.base import exact_json
from deployments.api.dialects.listed import PYTHON_TAG
from deployments.api.dialects.marked import parse_marked
from deployments.api.dialects.named import Functions, object_of
from deployments.api.dialects.scanner import Malformed, Scanner, is_json
from deployments.api.dialects.segments import Parser, Segment
from deployments.api.dialects.written_values import arguments_of
from engine.base.errors import InvalidGrammar
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
_SIGNS = ("", "+", "-", ".")
"""Possible beginnings of a number."""
_CUT_ESCAPE = re.compile(r"\\\w{0,7}\Z")


def parse_pythonic(functions: Functions, until: str = "") -> Parser[None]:
    """Parse text, and lists of calls of `functions`, after marks or at the beginning."""
    return _parse(functions, (PYTHON_TAG, _START), _END, "[", until)


def parse_marked_pythonic(functions: Functions, until: str = "") -> Parser[None]:
    """Parse text, and calls of `functions` between marks, each on a line."""
    return _parse(functions, (OPEN,), CLOSE, None, until)


def _parse(
    functions: Functions, openings: Sequence[str], closing: str, initial: str | None, until: str
) -> Parser[None]:

    def calls(at: Scanner, opening: str) -> Parser[None]:
        """Parse calls, in a list or not, up to the first text that is no call. Raises `Malformed` if the first is
        none."""
        if (yield from at.spaces()) == "[":
            at.take()
        yield from at.spaces()
        is_whole = yield from _Call(at, functions).parse()
        while is_whole and (char := (yield from at.spaces())):
            if char in "],":
                at.take()
                if char == "]":
                    at.drop()
                continue
            count = at.num_held
            try:
                is_whole = yield from _Call(at, functions).parse()
            except Malformed:
                at.back(count)
                return
        if is_whole:
            at.drop()

    return parse_marked(openings, (closing,), calls, initial=initial, until=until)


class _Call:
    """One call, whose arguments are released one by one, each when it is complete."""

    def __init__(self, at: Scanner, functions: Functions) -> None:
        self._at, self._functions = at, functions
        self._name = ""
        self._given: dict[str, str] = {}
        """The arguments as JSON, by their keys."""
        self._again: list[str] = []
        """Other values of these keys."""

    def parse(self) -> Parser[bool]:
        """Parse up to the call's bracket, or to a mark that ends it. Returns whether it is complete. Raises
        `Malformed` if it may be no call.
        """
        at = self._at
        self._name = (yield from _until(at, "(")).strip()
        if self._name not in self._functions:
            raise Malformed
        at.take()
        is_whole = True
        try:
            while is_whole and (yield from at.spaces()) != ")" and not (yield from at.is_ended()):
                is_whole = yield from self._argument()
        except Malformed:
            if not self._given:
                raise
            is_whole = False
        if is_whole:
            if (yield from at.look()) == ")":
                at.take()
            at.drop()
            if not self._given:
                yield Segment("call", self._name)
            yield Segment("arguments", "}" if self._given else "{}")
            yield Segment("end")
        if self._again:
            yield Segment("text", "\n".join(self._again))
        return is_whole

    def _argument(self) -> Parser[bool]:
        """Parse an argument and the comma after it. Returns whether its value is complete."""
        at = self._at
        try:
            key = (yield from _until(at, "=")).strip()
        except Malformed:
            if (yield from at.look()) or not self._given:
                raise
            yield from self._add(at.held.strip(", \t\r\n"), "", is_cut=True)
            return False
        if not key.isidentifier():
            raise Malformed
        at.take()
        written, is_whole = yield from _literal(at)
        yield from self._add(key, _as_json(written) if is_whole else _beginning(written))
        if is_whole and (yield from at.look()) == ",":
            at.take()
        return is_whole

    def _add(self, key: str, value: str, *, is_cut: bool = False) -> Parser[None]:
        """Release an argument. With `is_cut`, the text ended in its key."""
        self._at.drop()
        if key in self._given and value not in ("", self._given[key]):
            self._again.append(value)
        if key in self._given or not (key or value):
            return
        if not self._given:
            yield Segment("call", self._name)
        written = json.dumps(key, ensure_ascii=False)
        written = written[:-1] if is_cut else f"{written}: {value}"
        yield Segment("arguments", f"{', ' if self._given else '{'}{written}")
        self._given[key] = value


def _until(at: Scanner, end: str) -> Parser[str]:
    """Take the text before `end`, on one line. Raises `Malformed` if it is not a word."""
    word = ""
    while (char := (yield from at.look())) != end:
        if not char or char in "()[]{}<=,\n\"'" or (yield from at.is_ended()):
            raise Malformed
        at.take()
        word += char
    return word


def _literal(at: Scanner) -> Parser[tuple[str, bool]]:
    """Take a value, up to the comma or the bracket after it. Returns it, and whether it is complete: the end of
    the text may cut it off, and a mark a text.
    """
    taken, depth, quote, is_escaped = "", 0, "", False
    while char := (yield from at.look()):
        if not quote and ((depth <= 0 and char in ",)") or (yield from at.is_ended())):
            return taken, True
        if quote and at.may_end(char) and (yield from at.is_broken(quote)):
            break
        at.take()
        taken += char
        if quote:
            quote = quote if is_escaped or char != quote else ""
            is_escaped = char == "\\" and not is_escaped
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "([{") - (char in ")]}")
    return taken, False


def _as_json(literal: str) -> str:
    """Return a literal of Python as JSON. Raises `Malformed` for anything else."""
    parts, rest = _parts(literal)
    if rest or not is_json(" ".join(parts)):  # Blanks keep "1 2" and "1+2" from becoming 12.
        raise Malformed
    return "".join(parts)


def _beginning(literal: str) -> str:
    """Return a literal that is cut off as the beginning of JSON. Raises `Malformed` for anything else."""
    parts, rest = _parts(literal)
    word = parts[-1] if parts else ""
    if rest[:1] in ("'", '"'):
        try:
            text = _text(f"{rest}{rest[0]}")
        except Malformed:  # an escape is cut off
            text = _text(f"{_CUT_ESCAPE.sub('', rest)}{rest[0]}")
        parts.append(text[:-1])
    elif rest not in _SIGNS:
        raise Malformed
    elif word.isalpha():
        parts[-1] = next((name[: len(word)] for known, name in _NAMES.items() if known.startswith(word)), word)
    try:
        exact_json.closed(f"[{' '.join(parts)}")
    except ValueError:
        raise Malformed from None
    return "".join(parts)


def _parts(literal: str) -> tuple[list[str], str]:
    """Return the tokens of a literal as those of JSON, and the remaining text."""
    parts: list[str] = []
    end = 0
    for token in _TOKEN.finditer(literal):
        if token.start() != end:
            break
        end = token.end()
        part = _token(token[0])
        if part in ("]", "}") and parts and parts[-1] == ",":
            parts.pop()
        if part:
            parts.append(part)
    return parts, literal[end:]


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
