"""Parses reasoning at the beginning of a model's text: <think>...</think>, or between a family's own marks.

A model may call without closing its reasoning, and it may draft calls while it reasons:

    <think>Rain? <tool_call>...</tool_call>                        a call: nothing closes the reasoning
    <think>Rain? <tool_call>...</tool_call> or so </think>No.      a draft: what is before the mark is reasoning

So what follows the opening mark of a call is held until one of two things decides. If the closing mark comes,
wherever it stands, all of it was reasoning. If the text ends first, the answer begins with the call. Where the
format's parser finds no call after the mark, it is reasoning at once. What is held is bounded by `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from deployments.api.tools import harmony
from deployments.api.tools.scanner import Scanner
from deployments.api.tools.segments import Parser, ParserDriver, Segment, SegmentKind


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


class Calls(NamedTuple):
    """How calls are found in reasoning."""

    begins: str
    """The mark with which they begin."""
    parser: Callable[[], Parser[None]]
    """Creates a parser of text with calls."""


def parse_reasoning(thoughts: Thoughts = THINK, *, is_open: bool, calls: Calls | None = None) -> Parser[None]:
    """Parse reasoning, then text. With `is_open`, the prompt ended with the opening mark: the text begins inside.

    White space around the marks is dropped. What nothing closes extends to a call, or to the end of the text.
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


def _parse_thought(at: Scanner, closes: str, calls: Calls | None) -> Parser[str]:
    """Parse reasoning up to its closing mark, or to the end of the text. Returns the text from a call on that
    ended it, or "". White space before the mark is dropped.
    """
    pending = _Pending(calls)
    begins = () if calls is None else (calls.begins,)
    yield Segment("reasoning", pending.take(at.held))
    at.drop()
    while (found := (yield from at.mark(closes, *begins))) != closes:
        if not at.held:
            if not (yield from at.look()):
                yield Segment("reasoning", pending.finish())
                break
            at.take()
        if found and not pending.is_call:
            yield Segment("hold")
        yield Segment("reasoning", pending.take(at.held, is_opening=bool(found)))
        at.drop()
    if pending.is_call and not found:
        return pending.text
    yield Segment("reasoning", pending.text.rstrip())
    return ""


class _Pending:
    """What was read in reasoning that may not be part of it: white space before a mark, and a call."""

    def __init__(self, calls: Calls | None) -> None:
        self.is_call = False
        """Whether the text begins with a call."""
        self._parts: list[str] = []
        self._calls = calls
        self._driver: ParserDriver | None = None
        """Parses all from the first opening mark of a call on."""

    @property
    def text(self) -> str:
        """What was read and is not known to be reasoning."""
        return "".join(self._parts)

    def take(self, text: str, *, is_opening: bool = False) -> str:
        """Add text, which may be a call's opening mark, and return what is certainly reasoning."""
        self._parts.append(text)
        if self.is_call:
            return ""
        if is_opening and self._calls is not None and self._driver is None:
            self._driver, text = ParserDriver(self._calls.parser()), self.text
        if self._driver is None:
            return self._first(len(self.text.rstrip()))
        return self._before_call(self._driver.push(text))

    def finish(self) -> str:
        """Return what is certainly reasoning once the text has ended. The rest is a call, or reasoning."""
        return self._before_call(self._driver.finish()) if self._driver and not self.is_call else ""

    def _before_call(self, segments: Iterable[Segment]) -> str:
        length = 0
        for segment in segments:
            if segment.kind == "call":
                self.is_call = True
                break
            length += len(segment.text)
        return self._first(length)

    def _first(self, length: int) -> str:
        """Remove the first characters, and return them."""
        if not length:
            return ""
        whole = self.text
        self._parts = [whole[length:]]
        return whole[:length]


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
