"""Scans marks and JSON one character at a time, holding back what it took until its kind is known."""

from __future__ import annotations

import json
from collections.abc import Collection

from deployments.api.tools.segments import Parser, Segment, SegmentKind

_SPACE = " \t\r\n"
_ENDS_SCALAR = _SPACE + ",}]"


class Malformed(Exception):
    """The scanned text is not a call."""


class Scanner:
    """A position in a text. Asks for a character only to look at it, so nothing certain is held back for it."""

    def __init__(self) -> None:
        self._next: str | None = None
        """The character that was looked at but not taken."""
        self._held: list[str] = []

    @property
    def held(self) -> str:
        """What was taken but not yet released."""
        return "".join(self._held)

    def look(self) -> Parser[str]:
        """Return the next character, or "" at the end, which cannot be taken."""
        if self._next is None:
            self._next = yield None
        return self._next

    def take(self) -> None:
        """Take and hold the character that was looked at."""
        assert self._next, "look first"
        self._held.append(self._next)
        self._next = None

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
        raw = yield from self.value(shown=False)
        try:
            text = str(json.loads(raw))
        except ValueError:
            raise Malformed from None
        yield from self.spaces()
        return text

    def value(self, *, shown: bool) -> Parser[str]:
        """Take a JSON value, counting brackets outside of strings. With `shown`, release it as it arrives.

        The value is returned as written, without checking that the text between the brackets is JSON.
        Raises `Malformed` at the end of the text and where no value begins.
        """
        taken: list[str] = []
        depth, is_string, is_escaped = 0, False, False
        while True:
            char = yield from self.look()
            if not char or (depth == 0 and not is_string and char in _ENDS_SCALAR):
                if char and taken:
                    return "".join(taken)
                raise Malformed
            self.take()
            taken.append(char)
            if shown:
                yield from self.release("arguments")
            if is_string:
                is_string = is_escaped or char != '"'
                is_escaped = char == "\\" and not is_escaped
            elif char == '"':
                is_string = True
            else:
                depth += (char in "{[") - (char in "}]")
            if depth == 0 and not is_string and char in '"}]':
                return "".join(taken)


def parse_call(at: Scanner, names: Collection[str], keys: Collection[str]) -> Parser[bool]:
    """Parse an object with a "name" among `names` and arguments under one of `keys`: an object, or nothing for {}.

    The call is released once it is certain: its name is known and its arguments have begun. What was held before
    is dropped then. Returns True if the call is complete, or False if the text ended or became malformed after
    that; the remainder is text. Raises `Malformed` if it is not a call, with all that was taken still held.
    """
    call = _Call(at, names)
    try:
        char = yield from at.token("{")
        while char != "}":
            key = yield from at.string()
            yield from at.token(":")
            yield from call.member(key, keys)
            char = yield from at.spaces()
            if char != "}":
                char = yield from at.token(",")
        at.take()
        yield from call.complete()
    except Malformed:
        if not call.is_released:
            raise
        if (yield from at.look()):
            yield from at.release()
        at.drop()
        return False
    return True


def parse_arguments(at: Scanner, name: str) -> Parser[bool]:
    """Parse the object that a call of `name` has as arguments, and release it as it comes. What was held before
    is dropped. Returns whether it was complete; if not, the text has ended in it, or the remainder is text.

    Raises `Malformed` if there is no object, with all that was taken still held.
    """
    if (yield from at.spaces()) != "{":
        raise Malformed
    at.drop()
    yield Segment("call", name)
    try:
        yield from at.value(shown=True)
    except Malformed:
        return False
    yield Segment("end")
    return True


class _Call:
    """One call whose members arrive in any order."""

    def __init__(self, at: Scanner, names: Collection[str]) -> None:
        self._at, self._names = at, names
        self._name: str | None = None
        self._arguments: str | None = None
        self.is_released = False

    def member(self, key: str, keys: Collection[str]) -> Parser[None]:
        """Parse the value of one member."""
        if key == "name" and self._name is None:
            self._name = yield from self._at.string()
            if self._name not in self._names:
                raise Malformed
        elif key in keys and self._arguments is None:
            if (yield from self._at.look()) != "{":
                raise Malformed
            if self._name is not None:
                yield from self._release(self._name)
            self._arguments = yield from self._at.value(shown=self.is_released)
        else:
            yield from self._at.value(shown=False)

    def complete(self) -> Parser[None]:
        """Complete the call when its object is closed. Raises `Malformed` if it lacks a name."""
        if self._name is None:
            raise Malformed
        if not self.is_released:
            yield from self._release(self._name)
            yield Segment("arguments", self._arguments or "{}")
        self._at.drop()
        yield Segment("end")

    def _release(self, name: str) -> Parser[None]:
        self.is_released = True
        self._at.drop()
        yield Segment("call", name)
