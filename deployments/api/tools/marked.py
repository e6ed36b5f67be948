"""Parses text in which calls stand between marks, whatever is between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deployments.api.tools.scanner import Malformed, Scanner
from deployments.api.tools.segments import Parser

ParseCall = Callable[[Scanner, str], Parser[None]]


def parse_marked(
    openings: Sequence[str], closings: Sequence[str], call: ParseCall, inner: Sequence[str] = ()
) -> Parser[None]:
    """Parse text, and calls that begin with one of `openings`. White space around calls is dropped.

    `call` parses what comes after the opening, which it is given, and raises `Malformed` if that is no call. The
    marks `closings` may follow a call, in this order, and any of them may be missing, or come late, after a text.
    Directly after a call any number of them may come, because models close again what is closed. At the end of
    the text, a truncated one suffices. `inner` are further marks that end JSON.
    """
    at = Scanner((*openings, *closings, *inner))
    left: Sequence[str] = ()
    is_after_call = False
    while True:
        yield from at.spaces()
        found = yield from at.mark(*openings, *closings)
        if found in openings:
            try:
                yield from call(at, found)
                left, is_after_call = closings, True
                if at.held.strip() and (yield from at.look()):
                    yield from at.release()
            except Malformed:
                left, is_after_call = (), False
                yield from at.release()
        elif found in (closings if is_after_call else left):
            at.drop()
            left = left[left.index(found) + 1 :] if found in left else left
        elif (yield from at.look()):
            is_after_call = False
            yield from at.text()
        else:
            rest = at.held.strip()
            if not (is_after_call and any(mark.startswith(rest) for mark in ("", *left))):
                yield from at.release()
            return


def expect(at: Scanner, marks: Sequence[str]) -> Parser[None]:
    """Take these marks, and white space before each. Raises `Malformed` where another text is."""
    for mark in marks:
        yield from at.spaces()
        if not (yield from at.mark(mark)):
            raise Malformed


def up_to(at: Scanner, mark: str) -> Parser[str]:
    """Take what comes before `mark`, and that. Raises `Malformed` where a line or another mark comes first."""
    word = ""
    while (char := (yield from at.look())) != mark[0]:
        if not char or char in "\n<":
            raise Malformed
        at.take()
        word += char
    if not (yield from at.mark(mark)):
        raise Malformed
    return word
