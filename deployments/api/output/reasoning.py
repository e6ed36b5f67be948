"""Parses reasoning at the beginning of a model's text: <think>...</think>, or between a family's own marks."""

from __future__ import annotations

from typing import NamedTuple

from deployments.api.tools import harmony
from deployments.api.tools.scanner import Scanner
from deployments.api.tools.segments import Parser, Segment, SegmentKind


class Thoughts(NamedTuple):
    """What stands before reasoning, and after it."""

    opens: str
    closes: str
    label: str = ""
    """What a model writes after the mark that opens reasoning, and which is no part of it."""
    around_answer: tuple[str, str] | tuple[()] = ()
    """What may stand around the answer after reasoning, and is no part of it."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that tell reasoning from the answer."""
        return self.opens, self.closes, *self.around_answer

    def is_shown(self, template: str) -> bool:
        """Whether a chat template shows the marks. Some begin reasoning in the prompt, some in the answer."""
        return all(mark in template for mark in self.marks[1:])


class Channels(Thoughts):
    """Reasoning that is a message in a channel of its own (`deployments/api/tools/harmony.py`)."""

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


def parse_reasoning(thoughts: Thoughts = THINK, *, is_open: bool) -> Parser[None]:
    """Parse reasoning, then text. With `is_open`, the prompt ended with the opening mark: the text begins inside.

    White space around the marks is dropped. What nothing closes extends to the end of the text.
    """
    if isinstance(thoughts, Channels):
        return (yield from harmony.parse_channels())
    at, (opens, closes, label, around_answer) = Scanner(), thoughts
    yield from at.spaces()
    found = yield from at.mark(opens, closes)
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
    if found != closes:
        yield from _parse_up_to(at, closes, "reasoning")
    at.drop()
    yield Segment("answer")
    yield from at.spaces()
    if not around_answer:
        return
    at.drop()
    before, after = around_answer
    if (yield from at.mark(before)):
        yield from at.spaces()
        at.drop()
        yield from _parse_up_to(at, after, "text")
        yield from at.spaces()
    else:
        yield from at.look()
        yield from at.release()


def _parse_up_to(at: Scanner, mark: str, kind: SegmentKind) -> Parser[None]:
    """Parse what is of one kind up to a mark or the end. White space before these is dropped with the mark."""
    while True:
        yield from at.spaces()
        if (yield from at.mark(mark)):
            break
        if not (yield from at.look()):
            if at.held.strip():
                yield from at.release(kind)
            break
        yield from at.text(kind)
    at.drop()
