"""The states of each request's last computed tokens that a layer drafts from.

step's hidden states    [ request a | b | c c c c ... ]      mapped to the states that the layer reads
kept of each request    [ piece | piece | piece ]            consecutive positions, at most `most` of them
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from engine.values.plan import Chunk
from engine.values.request import Request


class _Piece(NamedTuple):
    """States of consecutive positions."""

    start: int
    rows: torch.Tensor
    """[N, hidden_size]; a view of the memory of a step."""

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + len(self.rows)


class HiddenStates:
    """Steps add to it in their thread, in which drafts behind a step read its states. Otherwise, a drafter reads
    those of requests that no step computes meanwhile. It forgets a request that no longer exists.
    """

    def __init__(self, most: int, states_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """most: how many positions of a request are kept, at least those of a step with draft tokens, which may be
        wrong; states_of: maps hidden states of a step, [N, hidden_width], which the next one overwrites, to those
        to keep, [N, hidden_size].
        """
        self._most, self._states_of = most, states_of
        self._kept: WeakKeyDictionary[Request, deque[_Piece]] = WeakKeyDictionary()

    def add(self, chunks: Sequence[Chunk], hidden: torch.Tensor) -> None:
        """Add the states of a step's tokens; `hidden` is [N, hidden_width]."""
        counts = [min(chunk.num_tokens, self._most) for chunk in chunks]
        ends = [*accumulate(chunk.num_tokens for chunk in chunks)]
        if sum(counts) < len(hidden):
            hidden = torch.cat([hidden[end - count : end] for end, count in zip(ends, counts, strict=True)])
        rows = self._states_of(hidden)
        for chunk, piece in zip(chunks, rows.split(counts), strict=True):
            self._append(chunk.request, _Piece(chunk.start + chunk.num_tokens - len(piece), piece))

    def first(self, request: Request) -> int:
        """Return the first position that is kept; if none is, the one that the next step computes first."""
        pieces = self._kept.get(request)
        return pieces[0].start if pieces else request.num_tokens - 1

    def take(self, request: Request, start: int, count: int) -> list[torch.Tensor]:
        """Return the states of `count` positions from `start` on, in parts, and drop all before the last of
        these. Each is [n, hidden_size].
        """
        pieces, end = self._kept[request], start + count
        found = [
            piece.rows[max(start - piece.start, 0) : end - piece.start]
            for piece in pieces
            if piece.end > start and piece.start < end
        ]
        while pieces[0].end < end:
            pieces.popleft()
        return found

    def last(self, request: Request, count: int) -> torch.Tensor:
        """Return the states of the last `count` positions, [count, hidden_size], which the last step has added."""
        return self._kept[request][-1].rows[-count:]

    def _append(self, request: Request, new: _Piece) -> None:
        """Add a piece. What was kept from its start on was computed after draft tokens that were wrong."""
        pieces = self._kept.setdefault(request, deque())
        while pieces and pieces[-1].start >= new.start:
            pieces.pop()
        if pieces and pieces[-1].end > new.start:
            pieces[-1] = _Piece(pieces[-1].start, pieces[-1].rows[: new.start - pieces[-1].start])
        elif pieces and pieces[-1].end < new.start:
            pieces.clear()
        pieces.append(new)
        while pieces[0].end <= new.end - self._most:
            pieces.popleft()
