"""Parses a call that is a JSON object, and the arguments of a call with its name before them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from deployments.api.dialects.named import object_of
from deployments.api.dialects.scanner import Malformed, Scanner
from deployments.api.dialects.segments import Parser, Segment

FENCE = "```"
_KEYS = ("arguments", "parameters")
_ANNOTATIONS = ("id", "type", "index")
"""Members of a call that are certainly no arguments."""


def fence(at: Scanner) -> Parser[bool]:
    """Take the mark that opens a fenced block of JSON, and white space; return whether there is one."""
    yield from at.spaces()
    found = not (yield from at.is_ended()) and bool((yield from at.mark(FENCE)))
    if found:
        yield from at.mark("json")
        yield from at.spaces()
    return found


def parse_call(at: Scanner, names: Collection[str]) -> Parser[None]:
    """Parse an object with a "name" among `names`, and with "arguments", which some models call "parameters". It
    may be the "function" of another object, as in requests.

    Arguments are an object, or a text that has one as JSON; there may be none, or null. An object without them
    that has other members is no call, because those may be the arguments. The call is released as soon as it is
    certain, and text held before is dropped then. Once it has its arguments it is complete, even if its object is
    not; text after the object is given back. Other members have no place in a call: they are omitted.

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


def parse_arguments(at: Scanner, name: str, *, is_ended_by_end: bool = False) -> Parser[None]:
    """Parse the object that a call of `name` has as arguments, and release it as it comes; there is none where a
    mark comes instead, or, with `is_ended_by_end`, the end of the text. Text held before is dropped. If the object
    is not complete, the text has ended in it, or the remainder is text.

    Raises `Malformed` for anything else, with all that was taken still held.
    """
    is_fenced = yield from fence(at)
    char = yield from at.look()
    has_none = char != "{"
    if has_none and char and not (yield from at.is_ended()):
        raise Malformed
    at.drop()
    yield Segment("call", name)
    with suppress(Malformed):
        if not has_none:
            yield from at.value("arguments")
        elif char or is_ended_by_end:
            yield Segment("arguments", "{}")
        else:
            return
        yield Segment("end")
        if is_fenced and (yield from at.spaces()) and (yield from at.mark(FENCE)):
            at.drop()


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
        self._is_nested = False
        """Whether it has another object for its function."""
        self.num_read = 0
        """Number of characters held up to the last complete member."""

    @property
    def is_certain(self) -> bool:
        """Whether this is a call, regardless of the text that follows."""
        return self._is_released or (self._is_told and self.is_call)

    @property
    def is_call(self) -> bool:
        """Whether the text read so far would be a complete call."""
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
        elif key == "function" and not (self._name or self._is_nested) and (yield from self._at.look()) == "{":
            self._is_nested = True
            yield from self.members()
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
        """Parse arguments; None if there are none. Raises `Malformed` for other text."""
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


def _is_nothing(written: str) -> bool:
    """Whether a JSON value is empty."""
    return "".join(written.split()) in ("", "null", "{}", "[]", '""')
