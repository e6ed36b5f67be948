"""The tokens by which a step advances recurrent states, in pieces, as the kernels for GPUs take them.

rows      [ a a a a a a | b b b b ]        a keeps its state after four tokens and after all
pieces    [ a a a a | a a | b b b b ]      of at most `PIECE` tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

PIECE = 32
"""Most tokens of a piece."""


class Advance(NamedTuple):
    """The tokens by which a row's state advances."""

    begin: int
    """Index of the first one in the step."""
    num_tokens: int
    source: int
    """Slot with the state before them."""
    kept: Sequence[tuple[int, int]]
    """Ascending numbers of tokens after which the state is kept, each with its slot."""


@dataclass(frozen=True, slots=True)
class StatePieces:
    """The tokens of several rows in pieces. A piece also ends where its state is kept. Tokens are given by their
    index in the step.
    """

    pieces: torch.Tensor
    """int64 [P, 4]: first token, number of tokens, row, slot for the state after the piece or -1."""
    rows: torch.Tensor
    """int64 [R, 4]: first token, slot with the state before it, first piece, piece after the last."""
    kept: torch.Tensor
    """int64 [K, 3]: row, token before which a state is kept, its slot."""

    @classmethod
    def of(cls, advances: Iterable[Advance]) -> StatePieces:
        """Return the pieces of rows, at least one, on the host."""
        pieces: list[tuple[int, int, int, int]] = []
        rows: list[tuple[int, int, int, int]] = []
        kept: list[tuple[int, int, int]] = []
        for row, advance in enumerate(advances):
            begin = first = advance.begin
            before = len(pieces)
            for end, slot in [*advance.kept, (advance.num_tokens, -1)]:
                while begin + end > first + PIECE:
                    pieces.append((first, PIECE, row, -1))
                    first += PIECE
                if slot >= 0 or begin + end > first:
                    pieces.append((first, begin + end - first, row, slot))
                first = begin + end
            kept += [(row, begin + end, slot) for end, slot in advance.kept]
            rows.append((begin, advance.source, before, len(pieces)))
        tables = (torch.from_numpy(np.array(table, dtype=np.int64)) for table in (pieces, rows, kept))
        return cls(*tables)
