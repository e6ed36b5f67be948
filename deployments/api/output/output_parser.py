"""An answer as its tokens come: what of it is reasoning, text and calls.

tokens ─▶ TextStream ─▶ text ─▶ read_thoughts ─┬─▶ reasoning
          stop strings                         └─▶ text ─▶ the format's reader ─┬─▶ content
                                                                                └─▶ calls
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from deployments.api.output.reasoning import CLOSE, OPEN, read_thoughts
from deployments.api.tools.formats import ToolFormat
from deployments.api.tools.segments import Piece, Reader
from engine.detokenizer import TextStream


@dataclass(frozen=True, slots=True)
class Sought:
    """What an answer's text is searched for."""

    thinks: bool = False
    is_thinking: bool = False
    """Whether the prompt ends inside reasoning."""
    format: ToolFormat | None = None
    """How calls are written; None: none are looked for."""
    names: frozenset[str] = frozenset()
    """Functions that may be called."""
    is_single: bool = False
    """Whether the answer is over after its first call."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What has to stay in the text, though special tokens spell it."""
        thoughts = (OPEN, CLOSE) if self.thinks else ()
        return thoughts + (self.format.marks if self.format else ())


NOTHING = Sought()
"""All is text."""


@dataclass(slots=True)
class CallDelta:
    """What came of one call. The first delta of a call has its id and its name."""

    index: int
    """Counts the calls of a choice."""
    id: str | None
    name: str | None
    arguments: str = ""


@dataclass(slots=True)
class Said:
    """What some tokens said."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    """One per call concerned."""


class AnswerReader:
    """Reads one choice."""

    def __init__(self, text: TextStream, sought: Sought) -> None:
        self._text, self._sought = text, sought
        self._thoughts = Reader(read_thoughts(is_open=sought.is_thinking)) if sought.thinks else None
        self._calls = Reader(sought.format.read(sought.names)) if sought.format else None
        self._num_calls = self._num_complete = 0
        self._has_thought, self._is_answering = False, False
        self._num_before_answer = 0
        self.stopped = False
        """Whether a stop string, or the only call there may be, ended the answer: later tokens are ignored."""

    @property
    def num_tokens(self) -> int:
        """Tokens that count: all pushed ones, or those up to the one that stopped it."""
        return self._text.num_tokens

    @property
    def num_reasoning(self) -> int:
        """Tokens of reasoning, up to and with the one that completed its closing mark."""
        return self._num_before_answer if self._has_thought else 0

    @property
    def is_call(self) -> bool:
        """Whether it has calls, and all of them are complete."""
        return 0 < self._num_calls == self._num_complete

    def push(self, token_ids: Sequence[int], *, is_last: bool) -> Said:
        """Add tokens; `is_last`: no more will come, and what was held back is what it is."""
        said = Said()
        # One by one, where it matters which token ends the reasoning or the answer.
        steps = [[token] for token in token_ids] if self._thoughts or self._calls else [token_ids]
        for step in steps:
            if not self.stopped:
                self._take(said, step)
        if is_last and not self.stopped:
            self._add(said, self._pieces(self._text.finish()))
            self._add(said, self._rest())
        return said

    def _take(self, said: Said, token_ids: Sequence[int]) -> None:
        if not self._is_answering:
            self._num_before_answer += len(token_ids)
        delta = self._text.push(token_ids)
        self._add(said, self._pieces(delta.text))
        if delta.stopped and not self.stopped:
            self._add(said, self._rest())
            self.stopped = True

    def _pieces(self, text: str) -> Iterator[Piece]:
        """What `text` made certain."""
        for piece in self._thoughts.push(text) if self._thoughts else [Piece("text", text)]:
            yield from self._answer(piece)

    def _rest(self) -> Iterator[Piece]:
        """What was held back, once there is no more text."""
        for piece in self._thoughts.finish() if self._thoughts else []:
            yield from self._answer(piece)
        yield from self._calls.finish() if self._calls else []

    def _answer(self, piece: Piece) -> Iterable[Piece]:
        """Text may hold calls; what is known to be reasoning cannot."""
        return self._calls.push(piece.text) if self._calls and piece.kind == "text" else [piece]

    def _add(self, said: Said, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if self.stopped:
                return
            if piece.kind == "text":
                said.text += piece.text
            elif piece.kind == "reasoning":
                said.reasoning += piece.text
                self._has_thought = True
            elif piece.kind == "answer":
                self._is_answering = True
            elif piece.kind == "call":
                said.calls.append(CallDelta(self._num_calls, f"call_{uuid.uuid4().hex[:24]}", piece.text))
                self._num_calls += 1
            elif piece.kind == "arguments":
                self._of_last_call(said).arguments += piece.text
            else:
                self._num_complete += 1
                self.stopped = self._sought.is_single

    def _of_last_call(self, said: Said) -> CallDelta:
        index = self._num_calls - 1
        if not said.calls or said.calls[-1].index != index:
            said.calls.append(CallDelta(index, None, None))
        return said.calls[-1]
