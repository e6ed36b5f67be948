"""Parses reasoning at the beginning of a model's text: <think>...</think>, or between a family's own marks.

A model may call without closing its reasoning, and it may draft calls while it reasons:

    <think>Rain? <tool_call>...</tool_call>                        a call: nothing closes the reasoning
    <think>Rain? <tool_call>...</tool_call> or so </think>No.      a draft: what is before the mark is reasoning

So text from the opening mark of a call on is held until one of two events decides. If the closing mark comes
outside of calls, all of it was reasoning. If the text ends first, the answer begins with the call. Where the
format's parser finds no call after the mark, the mark is released as reasoning immediately. `max_tokens` bounds
the held text. A closing mark in a text of a call's arguments is part of that text, if the text is closed after it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from deployments.api.dialects import harmony
from deployments.api.dialects.marked import expect, parse_marked
from deployments.api.dialects.scanner import Scanner
from deployments.api.dialects.segments import Parser, Segment


class Thoughts(NamedTuple):
    """The marks before and after reasoning."""

    opens: str
    closes: str
    label: str = ""
    """Text that a model writes after the mark that opens reasoning, and which is no part of it."""
    around_answer: tuple[str, str] | tuple[()] = ()
    """Marks that may enclose the answer after reasoning, and are no part of it."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that separate reasoning from the answer."""
        return self.opens, self.closes, *self.around_answer

    def is_shown(self, template: str) -> bool:
        """Whether a chat template shows the marks. Some begin reasoning in the prompt, some in the answer."""
        return all(mark in template for mark in self.marks[1:])


class Channels(Thoughts):
    """Reasoning that is a message in a channel of its own (`deployments/api/dialects/harmony.py`)."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Implement `Thoughts`."""
        return harmony.MARKS


HARMONY = Channels(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", harmony.END)
"""gpt-oss'."""
THINK = Thoughts("<think>", "</think>")
KNOWN = (
    Thoughts("<think>", "</think>", around_answer=("<response>", "</response>")),
    THINK,
    Thoughts("<seed:think>", "</seed:think>"),
    Thoughts("[THINK]", "[/THINK]"),
    Thoughts("<|channel>", "<channel|>", label="thought\n"),
    Thoughts("Here is my thought process:", "Here is my response:"),
)
"""Those of Granite 3.3, most families, Seed-OSS, Magistral and Ministral 3, Gemma 4, and Granite 3.2.
They are searched for in this order."""


CreateCallParser = Callable[[str], Parser[None]]
"""Creates a parser of reasoning with calls, given the mark that closes it (`dialects/marked.py`)."""


def without_calls(closes: str) -> Parser[None]:
    """Parse reasoning in which there are no calls."""
    return parse_marked((), (), expect, until=closes)


def parse_reasoning(
    thoughts: Thoughts = THINK, *, is_open: bool, calls: CreateCallParser = without_calls
) -> Parser[None]:
    """Parse reasoning, then text. With `is_open`, the prompt ended with the opening mark: the text begins inside.

    White space around the marks is dropped. Unclosed reasoning extends to a call, or to the end of the text.
    """
    if isinstance(thoughts, Channels):
        return (yield from harmony.parse_channels())
    at, (opens, closes, label, around_answer) = Scanner(), thoughts
    yield from at.spaces()
    found = yield from at.sees(opens, closes)
    if found or not is_open:  # or else the mark of a call may come
        yield from at.mark(opens, closes)
    if found != opens and not is_open:
        yield from at.look()
        yield from at.release()
        return
    yield Segment("reasoning")
    if found == opens:
        at.drop()
        if (yield from at.mark(label)):
            at.drop()
        yield from at.spaces()
    if not at.held.strip():
        at.drop()
    called = ""
    if found != closes:
        called = yield from _parse_thought(at, closes, calls)
    at.drop()
    yield Segment("answer", called and "call")
    if called:
        yield Segment("text", called)
        return
    yield from at.spaces()
    at.drop()
    if around_answer:
        yield from _parse_answer(at, *around_answer)
    yield from at.leave()


def _parse_answer(at: Scanner, before: str, after: str) -> Parser[None]:
    """Parse an answer that may stand between marks."""
    if (yield from at.mark(before)):
        yield from at.spaces()
        at.drop()
        yield from _parse_up_to(at, after)
        yield from at.spaces()
        at.drop()
    else:
        yield from at.look()


def _parse_thought(at: Scanner, closes: str, calls: CreateCallParser) -> Parser[str]:
    """Parse reasoning up to its closing mark, or to the end of the text. Returns the text from a call on that
    ended it, or "". White space before the mark is dropped.
    """
    parser, is_call = calls(closes), False
    next(parser)
    at.back()
    while True:
        if char := (yield from at.look()):
            at.take()
        num_certain, after = 0, None
        for segment in _fed(parser, char):
            if after is not None:
                after += 1
            elif segment.kind == "answer":
                after = 0
            elif segment.kind == "call":
                is_call = True
            elif segment.kind == "hold" and not is_call:
                yield segment
            elif segment.kind == "text" and not is_call:
                num_certain += len(segment.text)
        if num_certain:
            certain = at.shift(num_certain)
            yield Segment("reasoning", certain if char else certain.rstrip())
        if after is not None:
            at.back(at.num_held - after)
            yield Segment("reasoning", at.held.removesuffix(closes).rstrip())
            return ""
        if not char:
            return at.held if is_call else ""


def _fed(parser: Parser[None], char: str) -> list[Segment]:
    """Return the segments that a parser finds in a character; after the answer began, one for each character."""
    segments: list[Segment] = []
    with suppress(StopIteration):
        segment = parser.send(char)
        while segment is not None:
            segments.append(segment)
            segment = next(parser)
    return segments


def _parse_up_to(at: Scanner, mark: str) -> Parser[None]:
    """Parse text up to a mark or the end. White space before these is dropped with the mark."""
    while True:
        yield from at.spaces()
        if (yield from at.mark(mark)):
            break
        if not (yield from at.look()):
            if at.held.strip():
                yield from at.release()
            break
        yield from at.text()
    at.drop()
