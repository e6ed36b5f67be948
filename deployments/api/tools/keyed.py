"""Calls with arguments one by one, each with its key, in marks: parsed, written, and as rules of a grammar.

<tool_call>                        <minimax:tool_call>                          <tool_call>NAME
<function=NAME>                    <invoke name="NAME">                         <arg_key>KEY</arg_key>
<parameter=KEY>                    <parameter name="KEY">VALUE</parameter>      <arg_value>VALUE</arg_value>
VALUE                              </invoke>                                    </tool_call>
</parameter>                       <invoke name="NAME">
</function>                        </invoke>
</tool_call>                       </minimax:tool_call>

Qwen3-Coder; nearly so Seed-OSS    MiniMax-M2                                   GLM-4.5 to 4.7

A value is a text where its schema allows nothing else. Elsewhere it is JSON, or a text if it is not.
"""

from __future__ import annotations

import contextlib
import json
import string
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from deployments.api.tools.marked import expect, parse_marked, up_to
from deployments.api.tools.named import (
    TEXT_OR_NULL,
    Functions,
    arguments_of,
    as_json,
    kinds,
    object_of,
    properties,
)
from deployments.api.tools.scanner import Malformed, Scanner
from deployments.api.tools.segments import Parser, Segment
from engine.errors import InvalidGrammar
from engine.grammar.compiler import schema_in_lark
from engine.grammar.lark import SpecialId, literal, up_to_mark

_IN_NAMES = string.ascii_letters + string.digits + "_-"
_NOT_IN_KEYS = frozenset('<>"\n')
_JUST_TEXT = frozenset({"string"})


@dataclass(frozen=True, slots=True)
class KeyedMarks:
    """OPENS (NAME (KEY VALUE)* END)* CLOSES, where each part has marks of its own."""

    opens: str
    """What begins a call, or all calls of an answer. It may be missing where names have a mark."""
    closes: str
    key: str
    """What comes before a key."""
    after_key: tuple[str, ...]
    """What comes between a key and its value."""
    ends_value: str
    name: str = ""
    """What comes before a name; "" if nothing but `opens` does."""
    after_name: str = ""
    ends_call: str = ""
    """What ends a call; "" if nothing but `closes` does."""
    around_value: str = ""
    """What a model writes on both sides of a value, beside the marks."""
    layout: str = "\n"
    """What a model writes between marks."""
    encloses_all: bool = False
    """Whether `opens` and `closes` stand around all calls, and not around each."""

    @property
    def all(self) -> tuple[str, ...]:
        """All marks that tell calls from text, or parts of calls from each other."""
        found = (self.opens, self.closes, self.name, self.key, *self.after_key, self.ends_value, self.ends_call)
        return tuple(mark for mark in found if len(mark) > 2)


QWEN3_CODER = KeyedMarks(
    opens="<tool_call>",
    closes="</tool_call>",
    name="<function=",
    after_name=">",
    ends_call="</function>",
    key="<parameter=",
    after_key=(">",),
    ends_value="</parameter>",
    around_value="\n",
)
SEED = replace(QWEN3_CODER, opens="<seed:tool_call>", closes="</seed:tool_call>", around_value="")
MINIMAX = KeyedMarks(
    opens="<minimax:tool_call>",
    closes="</minimax:tool_call>",
    name='<invoke name="',
    after_name='">',
    ends_call="</invoke>",
    key='<parameter name="',
    after_key=('">',),
    ends_value="</parameter>",
    encloses_all=True,
)
GLM = KeyedMarks(
    opens="<tool_call>",
    closes="</tool_call>",
    key="<arg_key>",
    after_key=("</arg_key>", "<arg_value>"),
    ends_value="</arg_value>",
)
GLM_47 = replace(GLM, layout="")


def parse_keyed(marks: KeyedMarks, functions: Functions) -> Parser[None]:
    """Parse text, and calls of `functions`."""

    def call(at: Scanner, opening: str) -> Parser[bool]:
        if opening == marks.opens:
            yield from at.spaces()
            if marks.name:
                yield from expect(at, (marks.name,))
        return (yield from _call(at, marks, functions))

    openings = (marks.opens, marks.name) if marks.name else (marks.opens,)
    return parse_marked(openings, (marks.closes,), call)


def _call(at: Scanner, marks: KeyedMarks, functions: Functions) -> Parser[bool]:
    """Parse a call from its name on. Returns whether a closing mark may follow it.

    Raises `Malformed` for unknown names, and where nothing tells the name from text.
    """
    name, ends_call = "", marks.ends_call or marks.closes
    while len(char := (yield from at.look())) and all(one in _IN_NAMES for one in char):
        at.take()
        name += char
    if name not in functions:
        raise Malformed
    if marks.after_name:
        yield from expect(at, (marks.after_name,))
        found = ""
    else:
        yield from at.spaces()
        found = yield from at.mark(marks.key, ends_call)
        if not found:
            raise Malformed
    at.drop()
    yield Segment("call", name)
    may_close = yield from _arguments(at, marks, functions[name] or {}, found)
    if not (yield from at.look()):  # what is held is part of a mark or a key that the end cut off
        at.drop()
    return may_close


def _arguments(at: Scanner, marks: KeyedMarks, schema: dict[str, Any], found: str) -> Parser[bool]:
    """Parse arguments and the mark that ends the call, of which `found` is taken. Returns as `_call` does."""
    separator, ends_call = "{", marks.ends_call or marks.closes
    while True:
        if not found:
            yield from at.spaces()
            found = yield from at.mark(marks.key, ends_call)
        if found == ends_call:
            at.drop()
            yield Segment("arguments", "}" if separator != "{" else "{}")
            yield Segment("end")
            return ends_call != marks.closes
        if not found:
            return False
        try:
            key = yield from up_to(at, marks.after_key[0])
            yield from expect(at, marks.after_key[1:])
        except Malformed:
            return False
        if marks.around_value and (yield from at.look()) == marks.around_value:
            at.take()
        at.drop()
        yield Segment("arguments", f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator, found = ", ", ""
        if not (yield from _value(at, marks, kinds(properties(schema).get(key, {}), schema))):
            return False


def _value(at: Scanner, marks: KeyedMarks, allowed: frozenset[str]) -> Parser[bool]:
    """Parse a value and its closing mark, and yield it as JSON; a text as it arrives. False if the text ended."""
    parts: list[str] = []
    is_text = allowed == _JUST_TEXT
    if is_text:
        yield Segment("arguments", '"')
    elif not allowed <= TEXT_OR_NULL and (yield from at.look()) in ("{", "["):  # the mark may be part of a text
        with contextlib.suppress(Malformed):
            yield from at.value(shown=False)
        parts.append(at.held)
        at.drop()
    while not (yield from at.mark(marks.around_value + marks.ends_value, marks.ends_value)):
        if not at.held:
            if not (yield from at.look()):
                yield Segment("arguments", "" if is_text else "".join(parts))
                return False
            at.take()
        if is_text:
            yield Segment("arguments", json.dumps(at.held, ensure_ascii=False)[1:-1])
        parts.append(at.held)
        at.drop()
    at.drop()
    yield Segment("arguments", '"' if is_text else as_json("".join(parts), allowed))
    return True


def written(marks: KeyedMarks, arguments: str) -> str:
    """Write arguments, given as JSON; those that are no object stay as they are."""
    values = object_of(arguments)
    if values is None:
        return arguments
    texts = {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in values.items()
    }
    return "".join(
        f"{_before_value(marks, key)}{text}{marks.around_value}{marks.ends_value}{marks.layout}"
        for key, text in texts.items()
    )


def _before_value(marks: KeyedMarks, key: str) -> str:
    return f"{marks.key}{key}{marks.layout.join(marks.after_key)}{marks.around_value}"


def argument_rules(marks: KeyedMarks, name: str, schema: dict[str, Any], special: SpecialId) -> list[str]:
    """Return rules of a grammar for arguments; the first is called `name`. Raises InvalidGrammar."""
    write = _Writer(marks, special)
    arguments = arguments_of(schema)
    if arguments is None:
        begin, _, end = _before_value(marks, "\0").partition("\0")
        return [
            f'{name}: ({write.mark(begin)} /[^<>"\\n]+/ {write.mark(end)} {name}_any)*',
            *write.text(f"{name}_any"),
        ]
    parts, rules = [], []
    for number, argument in enumerate(arguments):
        if _NOT_IN_KEYS & set(argument.name) or not argument.name:
            raise InvalidGrammar(
                f"the argument {argument.name!r} cannot be written in this model's format of calls"
            )
        rule = f"{name}_{number}"
        parts.append(rule if argument.is_required else f"{rule}?")
        head = write.mark(_before_value(marks, argument.name))
        rules += [f"{rule}: {head} {rule}_value", *write.value(f"{rule}_value", argument.schema)]
    return [f"{name}: {' '.join(parts) or chr(34) * 2}", *rules]


class _Writer:
    """Writes rules for values and the marks around them."""

    def __init__(self, marks: KeyedMarks, special: SpecialId) -> None:
        self._marks, self._special = marks, special

    def mark(self, text: str) -> str:
        """Write a text with marks."""
        return literal(text, self._marks.all, self._special)

    def text(self, rule: str, count: str = "*") -> list[str]:
        """Return rules for a text, and the mark that ends it."""
        marks = self._marks
        text = up_to_mark(f"{rule}_text", marks.ends_value, self._special, count=count, before=marks.around_value)
        return [f"{rule}: {rule}_text {self.mark(marks.layout)}", text]

    def value(self, rule: str, schema: dict[str, Any]) -> list[str]:
        """Return rules for a value, and the mark that ends it."""
        allowed = kinds(schema, schema)
        end = self.mark(f"{self._marks.around_value}{self._marks.ends_value}{self._marks.layout}")
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if not allowed <= TEXT_OR_NULL:
            return [f"{rule}: {rule}_json {end}", f"{rule}_json: {schema_in_lark(schema)}"]
        if isinstance(choices, list):
            texts = ("null" if choice is None else str(choice) for choice in choices)
            return [f"{rule}: ({' | '.join(self.mark(text) or chr(34) * 2 for text in texts)}) {end}"]
        if allowed == {"null"}:
            return [f'{rule}: "null" {end}']
        if "pattern" in schema:
            raise InvalidGrammar("pattern is not supported, because this model writes texts without quotes")
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        return self.text(rule, "*" if not least and most == "" else f"{{{least},{most}}}")
