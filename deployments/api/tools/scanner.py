"""Scans marks and JSON one character at a time, holding back what it took until its kind is known."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress

from deployments.api import exact_json
from deployments.api.tools.named import object_of
from deployments.api.tools.segments import Parser, Segment, SegmentKind

_SPACE = " \t\r\n"
_ENDS_SCALAR = _SPACE + ",}]"
_CLOSING = {"{": "}", "[": "]"}
_CONTROLS = {chr(code): json.dumps(chr(code))[1:-1] for code in range(32)}
"""Characters that models write into texts, where JSON has only escapes for them."""
_KEYS = ("arguments", "parameters")
_ANNOTATIONS = ("id", "type", "index")
"""Members of a call that are certainly no arguments."""


class Malformed(Exception):
    """The scanned text is not a call."""


class Scanner:
    """A position in a text. Asks for a character only to look at it, so nothing certain is held back for it."""

    def __init__(self, ends: Sequence[str] = ()) -> None:
        self._ends = ends
        """Marks that end JSON, and what else has brackets, wherever they stand outside of a text."""
        self._initials = frozenset(mark[0] for mark in ends)
        self._ahead: deque[str] = deque()
        """Characters that were looked at but not taken."""
        self._is_over = False
        self._held: list[str] = []

    @property
    def held(self) -> str:
        """What was taken but not yet released."""
        return "".join(self._held)

    @property
    def num_held(self) -> int:
        """Number of characters that are held."""
        return len(self._held)

    @property
    def is_over(self) -> bool:
        """Whether the end of the text has been seen."""
        return self._is_over

    def look(self) -> Parser[str]:
        """Return the next character, or "" at the end, which cannot be taken."""
        if not self._ahead and not self._is_over:
            char = yield None
            if char:
                self._ahead.append(char)
            self._is_over = not char
        return self._ahead[0] if self._ahead else ""

    def take(self) -> None:
        """Take and hold the character that was looked at."""
        self._held.append(self._ahead.popleft())

    def back(self, count: int = 0) -> None:
        """Give back what is held but the first `count` characters, to be looked at again."""
        self._ahead.extendleft(reversed(self._held[count:]))
        del self._held[count:]

    def drop(self) -> None:
        """Discard what is held, because it was syntax or has been released."""
        self._held.clear()

    def release(self, kind: SegmentKind = "text") -> Parser[None]:
        """Yield what is held as a segment of this kind."""
        if self._held:
            yield Segment(kind, self.held)
        self.drop()

    def text(self, kind: SegmentKind = "text") -> Parser[None]:
        """Yield what is held as a segment of this kind; if nothing is held, the next character."""
        if not self._held and (yield from self.look()):
            self.take()
        yield from self.release(kind)

    def spaces(self) -> Parser[str]:
        """Take white space and return the character after it, which is not taken."""
        while (char := (yield from self.look())) and char in _SPACE:
            self.take()
        return char

    def mark(self, *marks: str) -> Parser[str]:
        """Take one of `marks` and return it; else return "" and keep what was taken as a prefix of a mark."""
        taken = ""
        while taken not in marks:
            char = yield from self.look()
            if not char or not any(mark.startswith(taken + char) for mark in marks):
                return ""
            taken += char
            self.take()
        return taken

    def sees(self, *marks: str) -> Parser[str]:
        """Return which of `marks` comes next, or "", and take nothing."""
        count = len(self._held)
        found = yield from self.mark(*marks)
        self.back(count)
        return found

    def is_ended(self) -> Parser[bool]:
        """Whether a mark comes next that ends what has brackets."""
        char = yield from self.look()
        return char[:1] in self._initials and bool((yield from self.sees(*self._ends)))

    def is_empty(self) -> Parser[bool]:
        """Whether an object comes next that has no members."""
        count = len(self._held)
        found = (yield from self.look()) == "{" and (yield from self.token("{")) == "}"
        self.back(count)
        return found

    def token(self, expected: str) -> Parser[str]:
        """Take this character and the space after it, and return the next. Raises `Malformed` for another."""
        if (yield from self.look()) != expected:
            raise Malformed
        self.take()
        return (yield from self.spaces())

    def string(self) -> Parser[str]:
        """Take a JSON string and the space after it. Raises `Malformed` for anything else."""
        if (yield from self.look()) != '"':
            raise Malformed
        raw = yield from self.value()
        try:
            text = str(exact_json.parse(raw))
        except ValueError:
            raise Malformed from None
        yield from self.spaces()
        return text

    def value(self, shown: SegmentKind | None = None) -> Parser[str]:
        """Take a JSON value, counting brackets outside of strings. It is released as it arrives if it is `shown`.

        The value is returned as it is written, but with escapes for the line breaks in texts, and it is not
        checked that the text between the brackets is JSON. A mark that ends it closes its brackets. Raises
        `Malformed` at the end of the text, where no value begins, and where a mark leaves no JSON.
        """
        taken: list[str] = []
        opened: list[str] = []
        is_string = is_escaped = False
        while True:
            char = yield from self.look()
            if not char:
                raise Malformed
            if not is_string:
                is_over = not opened and char in _ENDS_SCALAR
                if is_over or (yield from self.is_ended()):
                    return (yield from self._closed(taken, opened, shown))
            self.take()
            taken.append(_CONTROLS.get(char, char) if is_string else char)
            if shown:
                self._held[-1] = taken[-1]
                yield from self.release(shown)
            if is_string:
                is_string = is_escaped or char != '"'
                is_escaped = char == "\\" and not is_escaped
            elif char == '"':
                is_string = True
            elif char in _CLOSING:
                opened.append(_CLOSING[char])
            elif char in "}]":
                opened.pop()
            if not opened and not is_string and char in '"}]':
                return "".join(taken)

    def _closed(self, taken: list[str], opened: list[str], shown: SegmentKind | None) -> Parser[str]:
        """Return a value that a mark or the next member ends, with its open brackets closed."""
        missing = "".join(reversed(opened))
        whole = "".join(taken) + missing
        if not taken or (opened and not is_json(whole)):
            raise Malformed
        if shown and missing:
            yield Segment(shown, missing)
        return whole


def _is_nothing(written: str) -> bool:
    """Whether a value of JSON has nothing in it."""
    return "".join(written.split()) in ("", "null", "{}", "[]", '""')


def is_json(text: str) -> bool:
    """Whether a text is JSON."""
    try:
        exact_json.parse(text)
    except ValueError:
        return False
    return True


def parse_call(at: Scanner, names: Collection[str]) -> Parser[None]:
    """Parse an object with a "name" among `names`, and with "arguments", which some models call "parameters".

    Arguments are an object, or a text that has one as JSON; there may be none, or null. An object without them
    that has other members is no call, because those may be the arguments. The call is released as soon as it is
    certain, and what was held before is dropped then. Once it has its arguments it is complete, whatever its
    object lacks; what is no part of the object is given back.

    Raises `Malformed` if it is not a call, with all that was taken still held.
    """
    call = _Call(at, names)
    try:
        yield from call.members()
    except Malformed:
        if not call.is_certain and not (call.is_call and (yield from at.is_ended())):
            raise
        if (yield from at.look()):
            at.back(call.num_read)
        at.drop()
    yield from call.end()


def parse_arguments(at: Scanner, name: str) -> Parser[None]:
    """Parse the object that a call of `name` has as arguments, and release it as it comes; there is none where a
    mark comes in its place. What was held before is dropped. If the object is not complete, the text has ended in
    it, or the remainder is text.

    Raises `Malformed` for anything else, with all that was taken still held.
    """
    has_none = (yield from at.spaces()) != "{"
    if has_none and not (yield from at.is_ended()):
        raise Malformed
    at.drop()
    yield Segment("call", name)
    with suppress(Malformed):
        if has_none:
            yield Segment("arguments", "{}")
        else:
            yield from at.value("arguments")
        yield Segment("end")


class _Call:
    """One call whose members arrive in any order."""

    def __init__(self, at: Scanner, names: Collection[str]) -> None:
        self._at, self._names = at, names
        self._name = ""
        self._arguments: str | None = None
        """As JSON, once they are complete; None as long as there are none, or an object without members."""
        self._is_told = False
        """Whether there was a member for arguments."""
        self._has_others = False
        """Whether other members may be the arguments."""
        self._is_released = False
        self.num_read = 0
        """Number of characters held up to the last complete member."""

    @property
    def is_certain(self) -> bool:
        """Whether this is a call, whatever comes next."""
        return self._is_released or (self._is_told and self.is_call)

    @property
    def is_call(self) -> bool:
        """Whether this is a call if nothing else comes."""
        return bool(self._name) and (self._arguments is not None or not self._has_others)

    def members(self) -> Parser[None]:
        """Parse the object. Raises `Malformed` if it is no call, or where it breaks off."""
        at = self._at
        char = yield from at.token("{")
        while char != "}":
            key = yield from at.string()
            yield from at.token(":")
            yield from self._member(key)
            self.num_read = at.num_held
            char = yield from at.spaces()
            if char != "}":
                char = yield from at.token(",")
        if not self.is_call:
            raise Malformed
        at.take()

    def end(self) -> Parser[None]:
        """Complete the call, unless it broke off in its arguments."""
        if not self._is_released:
            yield from self._release(self._arguments or "{}")
        elif self._arguments is None:
            return
        self._at.drop()
        yield Segment("end")

    def _member(self, key: str) -> Parser[None]:
        """Parse the value of one member. Raises `Malformed` for arguments that differ from earlier ones."""
        if key == "name" and not self._name:
            name = yield from self._at.string()
            if name not in self._names:
                raise Malformed
            self._name = name
        elif key in _KEYS and self._arguments is None:
            self._arguments = yield from self._take_arguments()
            self._is_told = True
        else:
            value = yield from self._at.value()
            is_news = not _is_nothing(value) and value != self._arguments
            self._has_others |= is_news and key not in _ANNOTATIONS
            if is_news and key in _KEYS:
                raise Malformed
        if self._name and self._arguments is not None and not self._is_released:
            yield from self._release(self._arguments)

    def _take_arguments(self) -> Parser[str | None]:
        """Parse arguments; None if there are none. Raises `Malformed` for what is neither."""
        at = self._at
        char = yield from at.look()
        if char == '"':
            written = (yield from at.string()).strip()
            is_object = object_of(written) is not None
        else:
            is_object = char == "{"
            if is_object and self._name and not (yield from at.is_empty()):
                yield from self._release("")
            written = yield from at.value("arguments" if self._is_released else None)
        if _is_nothing(written):
            return None
        if not is_object:
            raise Malformed
        return written

    def _release(self, arguments: str) -> Parser[None]:
        self._is_released = True
        self._at.drop()
        yield Segment("call", self._name)
        yield Segment("arguments", arguments)
