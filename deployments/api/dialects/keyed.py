"""Calls with arguments one by one, each with its key, in marks: parsed and written.

<tool_call>                        <minimax:tool_call>                          <tool_call>NAME
<function=NAME>                    <invoke name="NAME">                         <arg_key>KEY</arg_key>
<parameter=KEY>                    <parameter name="KEY">VALUE</parameter>      <arg_value>VALUE</arg_value>
VALUE                              </invoke>                                    </tool_call>
</parameter>                       <invoke name="NAME">
</function>                        </invoke>
</tool_call>                       </minimax:tool_call>

Qwen3-Coder; nearly so Seed-OSS    MiniMax-M2                                   GLM-4.5 to 4.7

A value is a text if its schema allows nothing else. Otherwise it is parsed as JSON, or is a text if that fails.

A value may lack its closing mark. It ends before a key that the call lacks, or before a mark at the call's end or
of another call. But such a mark is part of the value if a text comes after it, and then the value's own mark
before another key. The value's own mark is part of it if a text comes after it, and then the same mark before any
other. So a value that has its own mark at its end, or before another mark, cannot be distinguished from one that
ends there. The text that decides is held: up to the next key or the next of these marks, or to the end of the
text.

If a key comes again, its first value stays, because that has been sent by then (parsers that wait for the whole
call take the last). Another value becomes text after the call, and so does text between arguments.
"""

from __future__ import annotations

import contextlib
import json
import string
from dataclasses import dataclass, replace
from typing import Any

from deployments.api.base import exact_json
from deployments.api.dialects.marked import expect, parse_marked, up_to
from deployments.api.dialects.named import TEXT_OR_NULL, Functions, as_json, kinds, object_of, properties
from deployments.api.dialects.scanner import Malformed, Scanner
from deployments.api.dialects.segments import Parser, Segment

_IN_NAMES = string.ascii_letters + string.digits + "_-"
NOT_IN_KEYS = frozenset('<>"\n')
_JUST_TEXT = frozenset({"string"})


@dataclass(frozen=True, slots=True)
class KeyedMarks:
    """OPENS (NAME (KEY VALUE)* END)* CLOSES, where each part has marks of its own."""

    opens: str
    """Begins a call, or all calls of an answer. It may be missing where names have a mark."""
    closes: str
    key: str
    """The mark before a key."""
    after_key: tuple[str, ...]
    """Marks between a key and its value."""
    ends_value: str
    name: str = ""
    """The mark before a name; "" if only `opens` comes before it."""
    after_name: str = ""
    ends_call: str = ""
    """The mark that ends a call; "" if only `closes` does."""
    around_value: str = ""
    """White space that a model writes on both sides of a value, between it and the marks."""
    layout: str = "\n"
    """White space that a model writes between marks."""
    encloses_all: bool = False
    """Whether `opens` and `closes` enclose all calls together, and not each."""

    @property
    def all(self) -> tuple[str, ...]:
        """All marks that separate calls from text, or parts of calls from each other."""
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


def parse_keyed(marks: KeyedMarks, functions: Functions, until: str = "") -> Parser[None]:
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
        if not (yield from at.look()):  # the held text is part of a mark or a key that the end cut off
            at.drop()

    return parse_marked(marks.openings, marks.ends, call, inner=marks.inner, until=until)


def _name(at: Scanner, marks: KeyedMarks, functions: Functions) -> Parser[tuple[str, str]]:
    """Take a name, and return it with the mark that was taken after it, if that is one of its arguments'.

    Raises `Malformed` for unknown names, and where no mark distinguishes the name from text.
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
        self._given: dict[str, str] = {}
        """The values as they are written, by their keys."""
        self._aside: list[str] = []
        """Text that has no place in the arguments: further values of the same keys, and text outside of
        arguments."""

    def parse(self, found: str) -> Parser[None]:
        """Parse up to the mark that ends the call, or to text that is no argument. The mark `found` is taken."""
        is_over = False
        while not is_over:
            found = found or (yield from self._mark())
            is_over = found != self._marks.key or not (yield from self._argument())
            if found and found != self._marks.key:
                self._at.drop()
                yield Segment("arguments", "}" if self._given else "{}")
                yield Segment("end")
            found = ""
        if self._aside:
            yield Segment("text", "\n".join(self._aside))

    def _mark(self) -> Parser[str]:
        """Return the mark of the next argument, or one at the call's end; "" if neither comes. It is taken if it
        is part of the call. Text between arguments is put aside.
        """
        at, marks = self._at, self._marks
        expected = (marks.key, marks.ends_value, *marks.ends)
        while True:
            yield from at.spaces()
            count = at.num_held
            found = yield from at.mark(*expected, *marks.openings)
            if not found and not (yield from at.look()):
                return ""
            at.back(count)
            found = found or (yield from _after_text(at, *expected))
            if not found:
                return ""
            self._put_aside(at.held)
            at.drop()
            if found not in (marks.key, marks.ends_value, marks.ends[0]):  # It belongs to the text after the call.
                return found
            yield from at.mark(found)
            if found != marks.ends_value:  # which may come twice
                return found
            at.drop()

    def _put_aside(self, text: str) -> None:
        self._aside += filter(None, [text.strip()])

    def _argument(self) -> Parser[bool]:
        """Parse a key and its value. Returns whether more may come."""
        at, marks = self._at, self._marks
        separator, count = ", " if self._given else "{", at.num_held
        try:
            key = yield from self._key()
        except Malformed:
            if (yield from at.look()):
                at.back(count)
                return True
            begun = at.held.rpartition(marks.key)[2].partition("<")[0].strip(' \n"')
            if begun:
                yield Segment("arguments", f"{separator}{json.dumps(begun, ensure_ascii=False)[:-1]}")
            return False
        if marks.around_value and (yield from at.look()) == marks.around_value:
            at.take()
        at.drop()
        is_new = key not in self._given
        if is_new:
            yield Segment("arguments", f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            self._given[key] = ""
        allowed = kinds(properties(self._schema).get(key, {}), self._schema)
        value, is_over = yield from self._value(allowed, is_shown=is_new)
        if is_new:
            self._given[key] = value
        elif value != self._given[key]:
            self._put_aside(value)
        return is_over

    def _key(self) -> Parser[str]:
        """Take a key and the marks after it. Raises `Malformed` where they are not."""
        key = yield from up_to(self._at, self._marks.after_key[0])
        yield from expect(self._at, self._marks.after_key[1:])
        return key

    def _value(self, allowed: frozenset[str], *, is_shown: bool) -> Parser[tuple[str, bool]]:
        """Parse a value. Returns it as it is written, and whether it ended before the text did. With `is_shown`,
        it is released as JSON; a text as it arrives.
        """
        at, is_text, is_over = self._at, allowed == _JUST_TEXT, False
        parts: list[str] = [] if allowed <= TEXT_OR_NULL else (yield from self._json())
        if is_text and is_shown:
            yield Segment("arguments", '"')
        while not is_over and ((char := (yield from at.spaces())) or at.held):
            if char and not at.may_end(char):
                at.take()
                part = at.held
            else:
                part, is_over = yield from self._part()
            parts.append(part)
            at.drop()
            if is_text and is_shown:
                yield Segment("arguments", json.dumps(part, ensure_ascii=False)[1:-1])
        whole = "".join(parts)
        if is_text and is_shown:
            yield Segment("arguments", '"' if is_over else "")
        elif is_shown:
            yield Segment("arguments", as_json(whole, allowed) if is_over else whole)
        return whole, is_over

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

    def _part(self) -> Parser[tuple[str, bool]]:
        """Take the next part of a value, after the white space that is held, and the mark that ends it. Returns
        the part, and whether the value ends there.
        """
        at, marks = self._at, self._marks
        space, count = at.held, at.num_held
        if (yield from at.sees(marks.ends_value)):
            yield from at.mark(marks.ends_value)
            if (yield from self._is_closed()):
                return space.removesuffix(marks.around_value), True
        elif (yield from self._is_unclosed()):
            return "", True
        elif at.num_held == count and (yield from at.look()):
            at.take()
        return at.held, False

    def _is_closed(self) -> Parser[bool]:
        """Whether the mark that was taken ends the value: another mark comes next, or the end; or else the value's
        own mark is not the next one.
        """
        at, count = self._at, self._at.num_held
        is_last = not (yield from at.spaces()) or (yield from at.is_ended())
        is_text = not is_last and bool((yield from _after_text(at, self._marks.ends_value)))
        at.back(count)
        return not is_text

    def _is_unclosed(self) -> Parser[bool]:
        """Whether a mark comes next that ends a value without its own. If it is part of the value, the text before
        the value's own mark is taken.
        """
        at, marks = self._at, self._marks
        if not (yield from at.is_ended(in_text=True)):
            return False
        count, is_on_new_line = at.num_held, "\n" in at.held
        if (yield from at.mark(*at.ends)) == marks.key:
            is_new = False
            with contextlib.suppress(Malformed):
                is_new = self._is_new((yield from self._key()), is_on_new_line)
            at.back(count)
            return is_new
        end = at.num_held
        yield from at.spaces()
        found = yield from at.sees(*at.ends)  # directly after the mark, any mark decides
        while not found and (char := (yield from at.look())):
            at.take()
            end = end if char.isspace() else at.num_held
            found = yield from at.sees(*marks.inner)
        is_text = found == marks.ends_value
        at.back(end if is_text else count)
        return not is_text

    def _is_new(self, key: str, is_on_new_line: bool) -> bool:
        """Whether a key is that of an argument that the call lacks. One that the schema does not name is on a line
        of its own.
        """
        named = properties(self._schema)
        is_plausible = bool(key) and not NOT_IN_KEYS & set(key)
        return is_plausible and key not in self._given and (is_on_new_line or not named or key in named)


def _after_text(at: Scanner, *expected: str) -> Parser[str]:
    """Take the text before the next mark if that is expected, and return the mark; otherwise ""."""
    count = at.num_held
    while not (yield from at.is_ended()) and (yield from at.look()):
        at.take()
    found = yield from at.sees(*expected)
    if not found:
        at.back(count)
    return found


def written(marks: KeyedMarks, arguments: str) -> str:
    """Write arguments, given as JSON; those that are no object stay as they are."""
    values = object_of(arguments)
    if values is None:
        return arguments
    return "".join(
        f"{before_value(marks, key)}{_text(value)}{marks.around_value}{marks.ends_value}{marks.layout}"
        for key, value in values.items()
    )


def _text(value: Any) -> str:
    """Write a value: a text unchanged, any other value as JSON."""
    compact = (",", ":")
    return value if isinstance(value, str) else exact_json.write(value, ensure_ascii=False, separators=compact)


def before_value(marks: KeyedMarks, key: str) -> str:
    """Write the text before the value of a key."""
    return f"{marks.key}{key}{marks.layout.join(marks.after_key)}{marks.around_value}"
