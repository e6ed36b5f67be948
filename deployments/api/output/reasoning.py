"""Parses reasoning at the beginning of a model's text: <think>...</think>, or between a family's own marks."""

from __future__ import annotations

from typing import NamedTuple

from deployments.api.tools import harmony
from deployments.api.tools.scanner import Scanner
from deployments.api.tools.segments import Parser, Segment


class Thoughts(NamedTuple):
    """What stands before reasoning, and after it."""

    opens: str
    closes: str
    label: str = ""
    """What a model writes after the mark that opens reasoning, and which is no part of it."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that tell reasoning from the answer."""
        return self.opens, self.closes


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
    THINK,
    Thoughts("<seed:think>", "</seed:think>"),
    Thoughts("[THINK]", "[/THINK]"),
    Thoughts("<|channel>", "<channel|>", label="thought\n"),
)
"""Those of most families, of Seed-OSS, of Magistral and Ministral 3, and of Gemma 4."""


def parse_reasoning(thoughts: Thoughts = THINK, *, is_open: bool) -> Parser[None]:
    """Parse reasoning, then text. With `is_open`, the prompt ended with the opening mark: the text begins inside.

    White space around the marks is dropped. Reasoning that nothing closes extends to the end of the text.
    """
    if isinstance(thoughts, Channels):
        return (yield from harmony.parse_channels())
    at, (opens, closes, label) = Scanner(), thoughts
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
    while found != closes:
        yield from at.spaces()
        found = yield from at.mark(closes)
        if not found and not (yield from at.look()):
            if at.held.strip():
                yield from at.release("reasoning")
            break
        if not found:
            yield from at.text("reasoning")
    at.drop()
    yield Segment("answer")
    yield from at.spaces()
