"""Scans marks and JSON one character at a time, holding back what it took until its kind is known."""

from __future__ import annotations

import json
from collections.abc import Collection

from deployments.api.tools.segments import Parser, Segment, SegmentKind

_SPACE = " \t\r\n"
_ENDS_SCALAR = _SPACE + ",}]"


class Malformed(Exception):
    """What was read is no call."""


class Scanner:
    """The position in a text. A character is asked for only when it is looked at: nothing certain waits for it."""

    def __init__(self) -> None:
        self._next: str | None = None
        """The character that was looked at and not taken."""
        self._held: list[str] = []

    @property
    def held(self) -> str:
        """What was taken and not yet told of."""
        return "".join(self._held)

    def look(self) -> Parser[str]:
        """The next character; "" at the end, which cannot be taken."""
        if self._next is None:
            self._next = yield None
        return self._next

    def take(self) -> None:
        """Hold the character that was looked at."""
        assert self._next, "look first"
        self._held.append(self._next)
        self._next = None

    def drop(self) -> None:
        """Hold nothing any more: it was syntax, which nobody misses, or it was told of."""
        self._held.clear()

    def release(self, kind: SegmentKind = "text") -> Parser[None]:
        """What is held was text, or what `kind` says."""
        if self._held:
            yield Segment(kind, self.held)
        self.drop()

    def text(self, kind: SegmentKind = "text") -> Parser[None]:
        """What is held was text, or what `kind` says; where nothing is held, the next character."""
        if not self._held and (yield from self.look()):
            self.take()
        yield from self.release(kind)

    def spaces(self) -> Parser[str]:
        """Take white space, and look at what follows it."""
        while (char := (yield from self.look())) and char in _SPACE:
            self.take()
        return char

    def mark(self, *marks: str) -> Parser[str]:
        """Take one of `marks` and say which; "" where none comes, with what it shares with them taken."""
        taken = ""
        while taken not in marks:
            char = yield from self.look()
            if not char or not any(mark.startswith(taken + char) for mark in marks):
                return ""
            taken += char
            self.take()
        return taken

    def token(self, expected: str) -> Parser[str]:
        """Take this character of JSON and look behind the space after it. Raises `Malformed` for another."""
        if (yield from self.look()) != expected:
            raise Malformed
        self.take()
        return (yield from self.spaces())

    def string(self) -> Parser[str]:
        """Take a JSON string, and the space after it. Raises `Malformed` when it is none."""
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
        """Take a JSON value, counting brackets outside of strings; `shown`: it is told of as it comes.

        Returned as it is written: whether what is between the brackets is JSON is for the client to find out.
        Raises `Malformed` at the text's end, and where no value begins.
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
    """An object with a "name" among `names`, and arguments under one of `keys`: an object, or nothing for {}.

    The call is told of as soon as it is certain to be one: its name is known and its arguments have begun. What is
    held before that is dropped then. True: the call is complete. False: the text ended after that, or went wrong;
    what is not the call's is text. Raises `Malformed` when it is none; all that was taken is still held.
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
        if not call.is_told:
            raise
        if (yield from at.look()):
            yield from at.release()
        at.drop()
        return False
    return True


class _Call:
    """One call as its members come, in any order."""

    def __init__(self, at: Scanner, names: Collection[str]) -> None:
        self._at, self._names = at, names
        self._name: str | None = None
        self._arguments: str | None = None
        self.is_told = False

    def member(self, key: str, keys: Collection[str]) -> Parser[None]:
        """Take the value of one member."""
        if key == "name" and self._name is None:
            self._name = yield from self._at.string()
            if self._name not in self._names:
                raise Malformed
        elif key in keys and self._arguments is None:
            if (yield from self._at.look()) != "{":
                raise Malformed
            if self._name is not None:
                yield from self._tell(self._name)
            self._arguments = yield from self._at.value(shown=self.is_told)
        else:
            yield from self._at.value(shown=False)

    def complete(self) -> Parser[None]:
        """The object is closed. Raises `Malformed` when it lacks a name."""
        if self._name is None:
            raise Malformed
        if not self.is_told:
            yield from self._tell(self._name)
            yield Segment("arguments", self._arguments or "{}")
        self._at.drop()
        yield Segment("end")

    def _tell(self, name: str) -> Parser[None]:
        self.is_told = True
        self._at.drop()
        yield Segment("call", name)
