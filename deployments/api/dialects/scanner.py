"""Scans marks and JSON one character at a time, holding the text that it took until its kind is known."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence

from deployments.api.base import exact_json
from deployments.api.dialects.segments import Parser, Segment, SegmentKind

_SPACE = " \t\r\n"
_ENDS_SCALAR = _SPACE + ",}]"
_CLOSING = {"{": "}", "[": "]"}
_CONTROLS = {chr(code): json.dumps(chr(code))[1:-1] for code in range(32)}
"""Characters that models write into texts, where JSON has only escapes for them."""
_AFTER_TEXT = ":,]})"


class Malformed(Exception):
    """The scanned text is not a call."""


class Scanner:
    """A position in a text. Requests a character only to look at it, so no certain text is held for it."""

    def __init__(self, ends: Sequence[str] = ()) -> None:
        self.ends = ends
        """Marks that end JSON, and other syntax with brackets, anywhere outside of a text."""
        self._initials = frozenset(mark[0] for mark in ends)
        self._ahead: deque[str] = deque()
        """Characters that were looked at but not taken."""
        self._position = 0
        """Number of characters taken since the beginning."""
        self._text = range(0)
        """Positions in a text that is known to be closed, so that marks there are part of it."""
        self._is_over = False
        self._held: list[str] = []

    @property
    def held(self) -> str:
        """Text that was taken but not yet released."""
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
        self._position += 1

    def back(self, count: int = 0) -> None:
        """Give back the held text except its first `count` characters, to be scanned again."""
        self._position -= len(self._held) - count
        if self._position < self._text.start:  # When read again, it may not be a text.
            self._text = range(0)
        self._ahead.extendleft(reversed(self._held[count:]))
        del self._held[count:]

    def shift(self, length: int) -> str:
        """Discard the first characters that are held, and return them."""
        count = 0
        while length > 0:
            length -= len(self._held[count])
            count += 1
        first = "".join(self._held[:count])
        del self._held[:count]
        return first

    def leave(self) -> Parser[None]:
        """Yield held and scanned text, except the last received character: from it on, all is text when a parser
        returns.
        """
        while len(self._ahead) > (not self._is_over):
            self.take()
        yield from self.release()

    def drop(self) -> None:
        """Discard the held text, because it was syntax or has been released."""
        self._held.clear()

    def release(self, kind: SegmentKind = "text") -> Parser[None]:
        """Yield the held text as a segment of this kind."""
        if self._held:
            yield Segment(kind, self.held)
        self.drop()

    def text(self, kind: SegmentKind = "text") -> Parser[None]:
        """Yield the held text as a segment of this kind; if none is held, the next character."""
        if not self._held and (yield from self.look()):
            self.take()
        yield from self.release(kind)

    def spaces(self) -> Parser[str]:
        """Take white space and return the character after it, which is not taken."""
        while (char := (yield from self.look())) and char in _SPACE:
            self.take()
        return char

    def mark(self, *marks: str) -> Parser[str]:
        """Take one of `marks` and return it; else return "" and keep the taken prefix of a mark."""
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

    def may_end(self, char: str) -> bool:
        """Whether a mark that ends syntax with brackets may begin with this character."""
        return char[:1] in self._initials

    def is_ended(self, *, in_text: bool = False) -> Parser[bool]:
        """Whether a mark comes next that ends syntax with brackets. The end of the text may cut it off."""
        char = yield from self.look()
        if not self.may_end(char) or self._position in self._text:
            return False
        count = len(self._held)
        found = yield from self.mark(*self.ends)
        is_cut = not found and not char[0].isalpha() and not in_text and not (yield from self.look())
        self.back(count)
        return bool(found) or is_cut

    def is_broken(self, quote: str) -> Parser[bool]:
        """Whether a mark comes next that ends an unclosed text. A mark is part of the text if a quote comes later,
        and after it a character that may follow a text. Otherwise the text was not closed before the mark.
        Characters after a mark are held until its text, or another, is closed.
        """
        if not (yield from self.is_ended(in_text=True)):
            return False
        count, start = len(self._held), self._position
        is_closed = yield from self._is_closed(quote)
        end = self._position
        self.back(count)
        if is_closed:
            self._text = range(start, end)
        return not is_closed

    def _is_closed(self, quote: str) -> Parser[bool]:
        """Take characters up to a quote, and up to the one that shows whether the quote closed a text."""
        is_mark = len(quote) > 1  # Such a quote has no escapes and occurs nowhere else.
        is_escaped = False
        while is_escaped or not (yield from self.sees(quote)):
            char = yield from self.look()
            if not char:
                return False
            is_escaped = char == "\\" and not is_escaped and not is_mark
            self.take()
        yield from self.mark(quote)
        char = yield from self.spaces()
        if char != "," or is_mark:
            return char in _AFTER_TEXT or (yield from self.is_ended())
        self.take()
        char = yield from self.spaces()
        if not (char[:1].isalpha() or char == "_"):
            return char == "" or char in "\"'{[(-" or char.isdigit()
        while (char := (yield from self.look())) and (char == "_" or char.isalnum()):
            self.take()
        return (yield from self.spaces()) in f"={_AFTER_TEXT}"

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
        checked that the text between the brackets is JSON. A mark that ends it closes its brackets, but no text.
        Raises `Malformed` at the end of the text, where no value begins, and where a mark leaves no JSON.
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
            elif self.may_end(char) and (yield from self.is_broken('"')):
                raise Malformed
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


def is_json(text: str) -> bool:
    """Whether a text is JSON."""
    try:
        exact_json.parse(text)
    except ValueError:
        return False
    return True
