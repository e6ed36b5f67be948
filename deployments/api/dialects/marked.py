"""Parses text in which calls are between marks, with any syntax of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deployments.api.dialects.scanner import Malformed, Scanner
from deployments.api.dialects.segments import Parser, Segment

ParseCall = Callable[[Scanner, str], Parser[None]]


def parse_marked(
    openings: Sequence[str],
    closings: Sequence[str],
    call: ParseCall,
    *,
    inner: Sequence[str] = (),
    initial: str | None = None,
    until: str = "",
) -> Parser[None]:
    """Parse text, and calls that begin with one of `openings`. White space around calls is dropped.

    `call` receives the opening, parses the text after it, and raises `Malformed` if that is no call: then the
    opening is text, and the text after it is parsed again. The marks `closings` may follow a call, in this order,
    and any of them may be missing, or come late, after a text. Directly after a call any number of them may come,
    because models close again what is closed. At the end of the text, a truncated one suffices. `inner` are
    further marks that end a call. With `initial`, a text that begins with this character may begin with calls.

    With `until`, this is reasoning: "hold" says where calls may begin, and "answer" that the mark `until` was
    found outside of calls. The rest is text.
    """
    ends = tuple(filter(None, [until]))
    at = Scanner((*openings, *closings, *inner, *ends))
    left: Sequence[str] = ()
    is_after_call = False
    while True:
        char = yield from at.spaces()
        if char and char != initial and not at.may_end(char):
            at.take()
            yield from at.release()
            is_after_call, initial = False, None
            continue
        found = yield from at.mark(*openings, *closings, *ends)
        if found in openings or char == initial:
            if until:
                yield Segment("hold")
            count = at.num_held
            try:
                yield from call(at, found)
                left, is_after_call = closings, True
                if at.held.strip() and (yield from at.look()):
                    yield from at.release()
            except Malformed:
                left, is_after_call = (), False
                at.back(count)
                yield from at.release()
        elif found and found == until:
            at.drop()
            yield Segment("answer")
            while (yield from at.look()):
                yield from at.text()
            return
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
        initial = None


def expect(at: Scanner, marks: Sequence[str]) -> Parser[None]:
    """Take these marks, and white space before each. Raises `Malformed` where another text is."""
    for mark in marks:
        yield from at.spaces()
        if not (yield from at.mark(mark)):
            raise Malformed


def up_to(at: Scanner, mark: str) -> Parser[str]:
    """Take the text before `mark`, and the mark. Raises `Malformed` if the line ends or another mark comes
    first."""
    word = ""
    while (char := (yield from at.look())) != mark[0]:
        if not char or char in "\n<" or (yield from at.is_ended()):
            raise Malformed
        at.take()
        word += char
    if not (yield from at.mark(mark)):
        raise Malformed
    return word
