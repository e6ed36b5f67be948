"""Parses gpt-oss' answers, in OpenAI's harmony format: messages, each in a channel.

    <|channel|>analysis<|message|>...<|end|>                                                     reasoning
    <|start|>assistant<|channel|>commentary<|message|>...<|end|>                                 text before calls
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>     a call
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>       the same
    <|start|>assistant<|channel|>final<|message|>...<|return|>                                   the answer

The prompt has `<|start|>assistant` of the first message. Format: https://github.com/openai/harmony
"""

from __future__ import annotations

import re
from contextlib import suppress

from deployments.api.dialects.json_calls import parse_arguments
from deployments.api.dialects.marked import parse_marked
from deployments.api.dialects.named import Functions
from deployments.api.dialects.scanner import Malformed, Scanner
from deployments.api.dialects.segments import Parser, Segment, SegmentKind

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, RETURN, CALL, CONSTRAIN = "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"
MARKS = (START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN)
NEXT = f"{START}assistant"
"""Comes before the channel of each message but the first."""
OPEN = f"{CHANNEL}commentary to=functions."
"""The beginning of a call."""
_ENDS = (END, RETURN, CALL, NEXT, OPEN)
"""Marks that end a message, or begin another."""
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_LONGEST_HEADER = 256
"""Characters; a longer text is no header."""


def parse_channels() -> Parser[None]:
    """Parse messages: those of `analysis`, and those to a recipient that is no function, are reasoning; the others
    are text, in which calls stay as `parse_harmony` reads them. Text without a header is text, too.
    """
    at = Scanner(_ENDS)
    has_answered = False
    before: SegmentKind | None = None
    while (yield from at.look()):
        header = yield from _header(at)
        kind, opening = _kind(header)
        if kind == "text" and not has_answered:
            has_answered = True
            yield Segment("answer")
        if opening:
            yield Segment("text", opening)
            if (yield from at.spaces()) == "{":  # a mark in one of its texts does not end it
                with suppress(Malformed):
                    yield from at.value("text")
        elif header is not None and kind == before:
            yield Segment(kind, "\n\n")  # between two messages of one kind
        end = yield from _body(at, kind)
        if opening and end:
            yield Segment("text", CALL)
        before = kind if not opening else None


def _header(at: Scanner) -> Parser[str | None]:
    """Take a message's header, and return it; None, with the taken text still held, if there is none. A header
    that the end of the text cuts off is dropped.
    """
    yield from at.spaces()
    word = yield from at.mark(START, CHANNEL, "to=")
    if not word:
        return None
    while not word.endswith(MESSAGE):
        char = yield from at.look()
        if not char and word.startswith("<"):
            at.drop()
        if not char or char == "\n" or len(word) > _LONGEST_HEADER:
            return None
        at.take()
        word += char
    at.drop()
    return word


def _kind(header: str | None) -> tuple[SegmentKind, str]:
    """Return the kind of a message, and for a call, its beginning as text."""
    if header is None:
        return "text", ""
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    if recipient is not None and recipient[1].startswith("functions."):
        return "text", f"{OPEN}{recipient[1].removeprefix('functions.')}{MESSAGE}"
    is_thought = recipient is not None or (channel is not None and channel[1] == "analysis")
    return ("reasoning" if is_thought else "text"), ""


def _body(at: Scanner, kind: SegmentKind) -> Parser[str]:
    """Release a message's text, up to the mark that ends it, which is returned; "" if the next message begins
    without it, or the text ends.
    """
    while True:
        count = at.num_held
        found = yield from at.mark(*_ENDS)
        if found in (NEXT, OPEN):
            at.back(count)
            yield from at.release(kind)
            return ""
        if found:
            at.drop()
            return found
        if not (yield from at.look()):
            yield from at.release(kind)
            return ""
        yield from at.text(kind)


def parse_harmony(functions: Functions, until: str = "") -> Parser[None]:
    """Parse text, and calls of `functions`."""

    def call(at: Scanner, opening: str) -> Parser[None]:
        name = ""
        while (char := (yield from at.look())) and char not in "<\n ":
            at.take()
            name += char
        if name not in functions:
            raise Malformed
        yield from at.spaces()
        if (yield from at.mark(CONSTRAIN, "json", MESSAGE)) == CONSTRAIN:
            yield from at.mark("json")
        if not at.held.endswith(MESSAGE):
            yield from at.spaces()
            if not (yield from at.mark(MESSAGE)):
                raise Malformed
        yield from parse_arguments(at, name, is_ended_by_end=True)  # The mark is not part of the text.

    return parse_marked((NEXT + OPEN, OPEN), (CALL,), call, until=until)
