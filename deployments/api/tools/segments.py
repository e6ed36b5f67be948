"""What a model's text turns out to be, and the machinery of reading it as it comes.

A reader is a generator that is sent one character at a time and yields what has become certain. So what it finds
is a function of the text alone, however the text was cut into tokens:

    send "{"   ─▶ None            nothing is certain yet: it may be a call, it may be text
    send "hm"  ─▶ Piece, Piece    it was text after all; then None: the next character, please
    send ""    ─▶ Piece, None     the end: what was held back is what it is

Letters and digits in a row are sent together, as no syntax begins or ends between them: they count as one
character.
A reader that returns has found all there is: the rest is text, from the last character it was sent on.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

PieceKind = Literal["text", "reasoning", "answer", "call", "arguments", "end"]
T = TypeVar("T")
_CHARACTERS = re.compile(r"[^\W_]+|.|\A\Z", re.DOTALL)
Reading = Generator["Piece | None", str, T]
"""A reader, or a part of one that hands back a `T`. None asks for the next character, "" being the end."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of an answer, of one kind."""

    kind: PieceKind
    """ "answer" ends the reasoning; "call" begins a call of the function that `text` names, "arguments" goes on
    with its JSON, "end" completes it."""
    text: str = ""


class Reader:
    """Drives one reading. Pure: the same text gives the same pieces, and no text raises."""

    def __init__(self, reading: Reading[None]) -> None:
        self._reading = reading
        self._is_over = False
        next(reading)

    def push(self, text: str) -> list[Piece]:
        """What `text` made certain, neighbours of one kind joined. O(len(text))."""
        return joined(self._pieces(text))

    def finish(self) -> list[Piece]:
        """The rest, once no more text comes. Nothing may be pushed after it."""
        return joined(self._pieces(""))

    def _pieces(self, text: str) -> Iterator[Piece]:
        for found in _CHARACTERS.finditer(text):
            try:
                piece = None if self._is_over else self._reading.send(found[0])
                while piece is not None:
                    yield piece
                    piece = next(self._reading)
            except StopIteration:
                self._is_over = True
            if self._is_over:
                yield Piece("text", text[found.start() :])
                return


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """`pieces` with neighbouring text, reasoning and arguments joined."""
    runs: list[tuple[PieceKind, list[str]]] = []
    for piece in pieces:
        if runs and runs[-1][0] == piece.kind and piece.kind in ("text", "reasoning", "arguments"):
            runs[-1][1].append(piece.text)
        else:
            runs.append((piece.kind, [piece.text]))
    told = [Piece(kind, "".join(texts)) for kind, texts in runs]
    return [piece for piece in told if piece.text or piece.kind != "text"]
