"""Incremental parsing of a model's text into segments of text, reasoning and tool calls.

A parser is a generator that is sent one character at a time and yields each segment once it is certain. Its
segments depend only on the text, not on how the text was cut into tokens:

    send "{"   ─▶ None                nothing is certain yet: this may be a call or text
    send "hm"  ─▶ Segment, Segment    it was text after all; then None asks for the next character
    send ""    ─▶ Segment, None       the text has ended: held text is released

Letters and digits in a row are sent together and count as one character, because no syntax begins or ends between
them, except where a mark that is a word may begin. When a parser returns, everything from the last character it
was sent is text.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

SegmentKind = Literal["text", "reasoning", "hold", "answer", "call", "arguments", "end"]
T = TypeVar("T")
_CHARACTERS = re.compile(r"[^\W_fH]+|.|\A\Z", re.DOTALL)  # Marks that are words begin with f or H.
Parser = Generator["Segment | None", str, T]
"""A parser, or a part of one that returns a `T`. It yields None to ask for the next character; "" is the end."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of an answer that is all of one kind."""

    kind: SegmentKind
    """ "hold": the reasoning may have ended before the text that was sent last. "answer": it has ended, there if
    this has a text. "call" begins a call of the function that `text` names, "arguments" continues its JSON, and
    "end" completes it."""
    text: str = ""


class ParserDriver:
    """Feeds text to one parser. Deterministic: the same text gives the same segments, and no text raises."""

    def __init__(self, parser: Parser[None]) -> None:
        self._parser = parser
        self._is_over = False
        next(parser)

    def push(self, text: str) -> list[Segment]:
        """Return the segments that `text` made certain, with neighbours of one kind joined. O(len(text)).

        No text, as of a token that ends within a character, is not the end.
        """
        return joined(self._segments(text)) if text else []

    def finish(self) -> list[Segment]:
        """Return the rest once no more text comes. Nothing may be pushed afterwards."""
        return joined(self._segments(""))

    def _segments(self, text: str) -> Iterator[Segment]:
        for found in _CHARACTERS.finditer(text):
            try:
                segment = None if self._is_over else self._parser.send(found[0])
                while segment is not None:
                    yield segment
                    segment = next(self._parser)
            except StopIteration:
                self._is_over = True
            if self._is_over:
                yield Segment("text", text[found.start() :])
                return


def joined(segments: Iterable[Segment]) -> list[Segment]:
    """Join neighbouring segments of text, reasoning and arguments."""
    runs: list[tuple[SegmentKind, list[str]]] = []
    for segment in segments:
        if runs and runs[-1][0] == segment.kind and segment.kind in ("text", "reasoning", "arguments"):
            runs[-1][1].append(segment.text)
        else:
            runs.append((segment.kind, [segment.text]))
    merged = [Segment(kind, "".join(texts)) for kind, texts in runs]
    return [segment for segment in merged if segment.text or segment.kind != "text"]
