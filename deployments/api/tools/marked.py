"""Parses text in which calls stand between marks, whatever is between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deployments.api.tools.scanner import Malformed, Scanner
from deployments.api.tools.segments import Parser

ParseCall = Callable[[Scanner, str], Parser[bool]]


def parse_marked(openings: Sequence[str], closings: Sequence[str], call: ParseCall) -> Parser[None]:
    """Parse text, and calls that begin with one of `openings`. White space around calls is dropped.

    `call` parses what comes after the opening, which it is given: it returns whether the call is complete, and
    raises `Malformed` if it is none. The marks `closings` may follow a complete call, in this order, and any of
    them may be missing; at the end of the text, a truncated one suffices.
    """
    at = Scanner()
    left: Sequence[str] = ()
    has_called = False
    while True:
        yield from at.spaces()
        found = yield from at.mark(*openings, *closings)
        if found in openings:
            try:
                left = closings if (yield from call(at, found)) else ()
                has_called = True
            except Malformed:
                left = ()
                yield from at.release()
        elif found in left:
            at.drop()
            left = left[left.index(found) + 1 :]
        elif (yield from at.look()):
            left = ()
            yield from at.text()
        else:
            rest = at.held.strip()
            if not (has_called and not rest) and not any(mark.startswith(rest) for mark in left):
                yield from at.release()
            return


def expect(at: Scanner, marks: Sequence[str]) -> Parser[None]:
    """Take these marks, and white space before each. Raises `Malformed` where another text is."""
    for mark in marks:
        yield from at.spaces()
        if not (yield from at.mark(mark)):
            raise Malformed


def up_to(at: Scanner, mark: str) -> Parser[str]:
    """Take what comes before `mark`, and that. Raises `Malformed` where it does not come on the same line."""
    word = ""
    while (char := (yield from at.look())) != mark[0]:
        if not char or char == "\n":
            raise Malformed
        at.take()
        word += char
    if not (yield from at.mark(mark)):
        raise Malformed
    return word
