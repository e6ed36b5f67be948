"""Parses and writes Gemma 4's calls, whose arguments have a syntax of their own.

    <|tool_call>call:NAME{city:<|"|>Oslo<|"|>,days:[1,2],by:{hour:true,unit:null}}<tool_call|>

Keys have no quotes, and texts are between marks, without escapes; the rest is as in JSON. Keys and texts in JSON's
quotes are accepted too, and Python's names for true, false and null. Other words are texts. Format:
https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4
"""

from __future__ import annotations

import json
import re
from typing import Any

from deployments.api.base import exact_json
from deployments.api.dialects.marked import expect, parse_marked, up_to
from deployments.api.dialects.named import ANYTHING, Functions, as_json, kinds, object_of, properties
from deployments.api.dialects.scanner import Malformed, Scanner
from deployments.api.dialects.segments import Parser, Segment

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALL = "call:"
MARKS = (OPEN, CLOSE, QUOTE)
PLAIN_KEY = re.compile(r"[^\s<>{}\[\],:\"](?:[^<>{}\[\],:\"\n]*[^\s<>{}\[\],:\"])?")
"""A key that needs no quotes."""
_CLOSING = {"{": "}", "[": "]"}
_ENDS_WORD = ",}]<"


def parse_gemma(functions: Functions, until: str = "") -> Parser[None]:
    """Parse text, and calls of `functions`."""

    def call(at: Scanner, opening: str) -> Parser[None]:
        yield from expect(at, (CALL,))
        name = (yield from up_to(at, "{")).strip()
        if name not in functions:
            raise Malformed
        at.drop()
        yield Segment("call", name)
        try:
            yield from _members(at, functions[name] or {})
            yield Segment("end")
        except Malformed:
            if not (yield from at.look()):  # The held text is part of a mark that the end cut off.
                at.drop()

    return parse_marked((OPEN,), (CLOSE,), call, until=until)


def _members(at: Scanner, schema: dict[str, Any]) -> Parser[None]:
    """Release arguments as JSON as they come, after the brace that opens them up to the one that closes them, or
    to a mark that ends the call.

    Raises `Malformed` at the end of the text, and where no key or no value is.
    """
    opened, separator = ["{"], ""
    yield Segment("arguments", "{")
    while opened:
        char = yield from at.spaces()
        if (yield from at.is_ended()):
            at.drop()
            yield Segment("arguments", "".join(_CLOSING[bracket] for bracket in reversed(opened)))
            return
        if separator and char == ",":
            at.take()
            char = yield from at.spaces()
        elif separator and char != _CLOSING[opened[-1]]:
            raise Malformed
        if char == _CLOSING[opened[-1]]:
            at.take()
            at.drop()
            yield Segment("arguments", _CLOSING[opened.pop()])
            separator = ", "
            continue
        allowed = ANYTHING
        if opened[-1] == "{":
            key = yield from _key(at, separator)
            separator += f"{json.dumps(key, ensure_ascii=False)}: "
            if len(opened) == 1:
                allowed = kinds(properties(schema).get(key, {}), schema)
        char = yield from at.spaces()
        at.drop()
        if char or opened[-1] == "{":
            yield Segment("arguments", separator)
        if not char:
            raise Malformed
        if char in _CLOSING:
            at.take()
            at.drop()
            yield Segment("arguments", char)
            opened.append(char)
            separator = ""
        else:
            yield from _scalar(at, allowed)
            separator = ", "


def _key(at: Scanner, separator: str) -> Parser[str]:
    """Take a key, and the colon after it. Raises `Malformed` for anything else, and at the end of the text, where
    the received part of the key is released.
    """
    try:
        char = yield from at.look()
        if char == '"':
            key = yield from at.string()
        elif char == "<":
            yield from expect(at, (QUOTE,))
            start = len(at.held)
            while not (yield from at.sees(QUOTE)):
                if (yield from at.is_broken(QUOTE)) or not (yield from at.look()):
                    raise Malformed
                at.take()
            key = at.held[start:]
            yield from at.mark(QUOTE)
        else:
            key = (yield from up_to(at, ":")).strip()
            if not key:
                raise Malformed
            return key
        yield from expect(at, (":",))
    except Malformed:
        if not (yield from at.look()):
            begun = at.held.lstrip(", \t\r\n").removeprefix(QUOTE).removeprefix('"')
            at.drop()
            if begun:
                yield Segment("arguments", f"{separator}{json.dumps(begun, ensure_ascii=False)[:-1]}")
        raise
    return key


def _scalar(at: Scanner, allowed: frozenset[str]) -> Parser[None]:
    """Release a value that is no list and no object; a text as it arrives.

    Raises `Malformed` where it breaks off.
    """
    char = yield from at.look()
    if char == "<":
        yield from expect(at, (QUOTE,))
        yield from _text(at)
    elif char == '"':
        yield from at.value("arguments")
    else:
        word = ""
        while char and char not in _ENDS_WORD and not (yield from at.is_ended()):
            at.take()
            word += char
            char = yield from at.look()
        if not word:
            raise Malformed
        at.drop()
        value = as_json(word.strip(), allowed)
        yield Segment("arguments", value if char else value.removesuffix('"'))
        if not char:
            raise Malformed


def _text(at: Scanner) -> Parser[None]:
    """Release a text as it arrives, and take the mark that ends it. Raises `Malformed` where it breaks off."""
    at.drop()
    yield Segment("arguments", '"')
    while char := (yield from at.look()):
        if at.may_end(char):
            if (yield from at.sees(QUOTE)):
                break
            if (yield from at.is_broken(QUOTE)):
                raise Malformed
        at.take()
        yield Segment("arguments", json.dumps(at.held, ensure_ascii=False)[1:-1])
        at.drop()
    else:
        raise Malformed
    yield from at.mark(QUOTE)
    at.drop()
    yield Segment("arguments", '"')


def written(arguments: str) -> str:
    """Write arguments, given as JSON, in the form between braces; those that are no object stay unchanged."""
    values = object_of(arguments)
    return arguments if values is None else _members_written(values)


def _members_written(values: dict[str, Any]) -> str:
    return ",".join(f"{key_written(key)}:{value_written(value)}" for key, value in values.items())


def key_written(key: str) -> str:
    """Write a key, between marks if it needs them."""
    return key if PLAIN_KEY.fullmatch(key) else f"{QUOTE}{key}{QUOTE}"


def value_written(value: Any) -> str:
    """Write a value of JSON. A text that contains the mark of texts cannot be distinguished from two."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return f"{{{_members_written(value)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(value_written, value))}]"
    return exact_json.write(value)
