"""Cuts an answer with log-probabilities into pieces in which the tokens spell the text.

    tokens    "Hel"    "lo E"    "N"    "x."      <|im_end|>
    text      "Hel"    "lo "            "ENx."                   where "END" is a stop string
    pieces    "Hel"                     "lo ENx."  ""
              [Hel]                     [lo E, N, x.]  [<|im_end|>]

A client may show the tokens of log-probabilities instead of the text. So a piece is one of three: text with the
tokens whose bytes are this text; tokens that are no part of the text, such as the end, marks, reasoning, calls and
stop strings; or text without tokens, where only a part of a token is text. The pieces' texts are the text, and
their tokens all tokens, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from engine.text.detokenizer import TokenDecoder
from engine.values.logprobs import TokenLogprobs

Piece = tuple[str, list[TokenLogprobs]]


class FirstToken(TokenLogprobs, frozen=True, array_like=True, gc=False):
    """The token with which a text begins, whose space a tokenizer may take away."""


@dataclass(slots=True)
class _Group:
    """Tokens that are whole characters together, or one that is no part of the text."""

    tokens: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    """Their text; "" for a token that texts omit."""
    is_mixed: bool = False
    """Whether a token that texts omit is among those that they contain."""


class SpelledText:
    """The text of one answer and its tokens, as they come."""

    def __init__(self, decoder: TokenDecoder) -> None:
        """`decoder` decodes as the answer's own does."""
        self._decoder = decoder
        self._groups: deque[_Group] = deque()  # tokens whose text has not arrived, or not completely
        self._open = _Group()  # Its last character is not complete.
        self._text = ""  # text that arrived for tokens that are not complete

    def add(self, tokens: Sequence[TokenLogprobs], text: str, *, is_settled: bool, is_last: bool) -> list[Piece]:
        """Add at most one token, and the text that it made certain; return the pieces that are complete.

        With `is_settled`, no more text comes of this and earlier tokens; with `is_last`, none at all. O(1) a token
        over a whole answer.
        """
        for token in tokens:
            self._decode(token)
        if self._open.tokens and (is_last or not self._decoder.is_open):
            self._open.text += self._decoder.rest() if is_last else ""
            self._groups.append(self._open)
            self._open = _Group()
        self._text += text
        pieces = list(self._matched())
        if is_settled:
            pieces += self._unmatched()
        return pieces

    def _decode(self, token: TokenLogprobs) -> None:
        """Add a token to the open group."""
        group, is_shown = self._open, token.token_id in self._decoder.shown([token.token_id])
        is_first = is_shown and not self._decoder.has_begun
        group.is_mixed = group.is_mixed or bool(group.tokens and not is_shown)
        group.tokens.append(FirstToken(*structs.astuple(token)) if is_first else token)
        group.text += self._decoder.push([token.token_id])

    def _matched(self) -> Iterator[Piece]:
        """Yield the certain pieces of the tokens, in order."""
        while self._groups:
            group = self._groups[0]
            if group.text and group.text.startswith(self._text) and group.text != self._text:
                return  # Its text, or the rest of it, may still arrive.
            self._groups.popleft()
            if not (group.text and self._text.startswith(group.text)):
                yield "", group.tokens
                continue
            self._text = self._text[len(group.text) :]
            if group.is_mixed:
                yield group.text, []
                yield "", group.tokens
            else:
                yield group.text, group.tokens
        if self._text:
            yield self._text, []
            self._text = ""

    def _unmatched(self) -> Iterator[Piece]:
        """Yield the text that only a part of a token spells, and the tokens that are not, or not all, text."""
        if self._text:
            yield self._text, []
            self._text = ""
        while self._groups:
            yield "", self._groups.popleft().tokens
        if self._open.tokens:
            yield "", self._open.tokens
            self._open = _Group()
