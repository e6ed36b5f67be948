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

A value may lack its closing mark. It ends before a key that the call lacks, or before a mark at the call's end.
But if its own mark comes before any other, the value goes on, because the mark is part of a text.
"""

from __future__ import annotations

import contextlib
import json
import string
from dataclasses import dataclass, replace
from typing import Any

from deployments.api import exact_json
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

    @property
    def ends(self) -> tuple[str, ...]:
        """The marks that end a call, from the innermost on."""
        return tuple(filter(None, (self.ends_call, self.closes)))

    @property
    def inner(self) -> tuple[str, ...]:
        """The marks before an argument, and after it."""
        return self.key, self.ends_value

    @property
    def openings(self) -> tuple[str, ...]:
        """The marks with which a call begins."""
        return tuple(filter(None, (self.opens, self.name)))


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

    def call(at: Scanner, opening: str) -> Parser[None]:
        if opening == marks.opens:
            yield from at.spaces()
            if marks.name:
                yield from expect(at, (marks.name,))
        name, found = yield from _name(at, marks, functions)
        at.drop()
        yield Segment("call", name)
        yield from _Arguments(at, marks, functions[name] or {}).parse(found)
        if not (yield from at.look()):  # what is held is part of a mark or a key that the end cut off
            at.drop()

    return parse_marked(marks.openings, marks.ends, call, marks.inner)


def _name(at: Scanner, marks: KeyedMarks, functions: Functions) -> Parser[tuple[str, str]]:
    """Take a name, and return it with the mark that was taken after it, if that is one of its arguments'.

    Raises `Malformed` for unknown names, and where nothing tells the name from text.
    """
    name, found = "", ""
    while len(char := (yield from at.look())) and all(one in _IN_NAMES for one in char):
        at.take()
        name += char
    if name not in functions:
        raise Malformed
    if marks.after_name:
        yield from expect(at, (marks.after_name,))
    else:
        yield from at.spaces()
        found = yield from at.mark(marks.key, *marks.ends)
        if not found:
            raise Malformed
    return name, found


class _Arguments:
    """The arguments of one call, and the mark that ends it."""

    def __init__(self, at: Scanner, marks: KeyedMarks, schema: dict[str, Any]) -> None:
        self._at, self._marks, self._schema = at, marks, schema
        self._given: set[str] = set()

    def parse(self, found: str) -> Parser[None]:
        """Parse up to the mark that ends the call, or to what is no argument. The mark `found` is taken."""
        at, marks = self._at, self._marks
        while True:
            if not found:
                yield from at.spaces()
                count = at.num_held
                found = yield from at.mark(marks.key, *marks.ends, *marks.openings)
                if found not in ("", marks.key, marks.ends[0]):  # it is left to what follows the call
                    at.back(count)
            if found and found != marks.key:
                at.drop()
                yield Segment("arguments", "}" if self._given else "{}")
                yield Segment("end")
            if found != marks.key:
                return
            try:
                key = yield from self._key()
            except Malformed:
                return
            found = ""
            if marks.around_value and (yield from at.look()) == marks.around_value:
                at.take()
            at.drop()
            separator = ", " if self._given else "{"
            self._given.add(key)
            yield Segment("arguments", f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            if not (yield from self._value(kinds(properties(self._schema).get(key, {}), self._schema))):
                return

    def _key(self) -> Parser[str]:
        """Take a key and the marks after it. Raises `Malformed` where they are not."""
        key = yield from up_to(self._at, self._marks.after_key[0])
        yield from expect(self._at, self._marks.after_key[1:])
        return key

    def _value(self, allowed: frozenset[str]) -> Parser[bool]:
        """Parse a value up to its end, and yield it as JSON; a text as it arrives. False if the text ended."""
        at, marks = self._at, self._marks
        is_text = allowed == _JUST_TEXT
        if is_text:
            yield Segment("arguments", '"')
        parts: list[str] = [] if allowed <= TEXT_OR_NULL else (yield from self._json())
        is_over = is_cut = False
        while not is_over and not is_cut:
            yield from at.spaces()
            part = space = at.held
            if (yield from at.sees(marks.ends_value)):
                yield from at.mark(marks.ends_value)
                part, is_over = space.removesuffix(marks.around_value), True
            elif not (yield from at.look()):
                is_cut = True
            elif (yield from self._is_unclosed()):
                part, is_over = "", True
            else:
                if at.held == space:
                    at.take()
                part = at.held
            at.drop()
            parts.append(part)
            if is_text:
                yield Segment("arguments", json.dumps(part, ensure_ascii=False)[1:-1])
        whole = "".join(parts)
        if is_text:
            yield Segment("arguments", "" if is_cut else '"')
        else:
            yield Segment("arguments", whole if is_cut else as_json(whole, allowed))
        return is_over

    def _json(self) -> Parser[list[str]]:
        """Take a list or an object, in which marks may be parts of texts. Returns nothing if none comes."""
        at = self._at
        if at.is_over or (yield from at.look()) not in ("{", "["):  # each text is searched to its end only once
            return []
        try:
            value = yield from at.value()
        except Malformed:
            at.back()
            return []
        at.drop()
        return [value]

    def _is_unclosed(self) -> Parser[bool]:
        """Whether a mark comes next that ends a value without its own. If it is part of the value, what comes
        before the value's own mark is taken.
        """
        at, marks = self._at, self._marks
        if not (yield from at.is_ended()):
            return False
        count, is_on_new_line = at.num_held, "\n" in at.held
        found = yield from at.mark(*marks.inner, *marks.ends, *marks.openings)
        if found == marks.key:
            is_new = False
            with contextlib.suppress(Malformed):
                is_new = self._is_new((yield from self._key()), is_on_new_line)
            at.back(count)
            return is_new
        end = at.num_held
        while not (yield from at.is_ended()) and (char := (yield from at.look())):
            at.take()
            end = end if char.isspace() else at.num_held
        is_text = bool((yield from at.sees(marks.ends_value)))
        at.back(end if is_text else count)
        return not is_text

    def _is_new(self, key: str, is_on_new_line: bool) -> bool:
        """Whether a key is that of an argument that the call lacks. One that the schema does not name is on a line
        of its own.
        """
        named = properties(self._schema)
        is_plausible = bool(key) and not _NOT_IN_KEYS & set(key)
        return is_plausible and key not in self._given and (is_on_new_line or not named or key in named)


def written(marks: KeyedMarks, arguments: str) -> str:
    """Write arguments, given as JSON; those that are no object stay as they are."""
    values = object_of(arguments)
    if values is None:
        return arguments
    return "".join(
        f"{_before_value(marks, key)}{_text(value)}{marks.around_value}{marks.ends_value}{marks.layout}"
        for key, value in values.items()
    )


def _text(value: Any) -> str:
    """Write a value: a text as it is, and all else as JSON."""
    compact = (",", ":")
    return value if isinstance(value, str) else exact_json.write(value, ensure_ascii=False, separators=compact)


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
