"""The use of recurrent states' slots by the rows of a step's batch.

a decode            [ x ]              its state advances by one token: all such rows together
a prompt            [ a b c | d e ]    its state is also kept at borders, for prompts that begin alike
with draft tokens   [ b c | x d d ]    drafts of the previous step, b and c, are applied; those of this one are not
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cache import StateStep
from engine.kernels.delta_pieces import Advance, StatePieces
from engine.values.plan import Chunk


@dataclass(frozen=True, slots=True)
class StateRow:
    """A row that does not simply advance by one token."""

    first: int
    """Index of its first token in the step."""
    num_tokens: int
    source: int
    """Slot with the state before it."""
    target: int
    """Slot for the state after it; with draft tokens, after those of the previous step."""
    num_replayed: int
    """Draft tokens of the previous step that `source` keeps and that were accepted."""
    has_drafts: bool
    borders: Sequence[tuple[int, int]]
    """Ascending numbers of its tokens after which the state is also kept, each with its slot."""

    @property
    def advance(self) -> Advance:
        """The tokens by which its state advances, replayed ones first."""
        num_tokens = self.num_replayed + self.num_tokens
        last = self.num_replayed if self.has_drafts else num_tokens
        kept = [(self.num_replayed + position, slot) for position, slot in self.borders]
        return Advance(num_tokens, self.source, [*kept, (last, self.target)])


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The use of states in one step."""

    plain: torch.Tensor
    """int64 [D]: the tokens of rows that advance by one token, by their index in the step."""
    sources: torch.Tensor
    """int64 [D]: slots with the states before them."""
    targets: torch.Tensor
    """int64 [D]: slots for the states after them."""
    rows: Sequence[StateRow]
    """All other rows."""
    pieces: StatePieces | None = None
    """The tokens of these; None if there are none."""

    @classmethod
    def of_decodes(cls, slots: torch.Tensor) -> StateBatch:
        """Return the batch of rows that all advance by one token, each in its slot, int64 [D]."""
        return cls(torch.arange(len(slots), device=slots.device), slots, slots, ())

    @classmethod
    def from_chunks(cls, chunks: Sequence[Chunk], null_slot: int) -> StateBatch:
        """Build the batch of a plan's chunks, on the host. A chunk without a `StateStep`, in steps outside of a
        scheduler, uses slot 0.
        """
        plain: list[tuple[int, int, int]] = []
        rows: list[StateRow] = []
        first = 0
        for chunk in chunks:
            use = chunk.state or StateStep(0 if chunk.start else None, 0, 0, ())
            source = null_slot if use.source is None else use.source
            if chunk.num_tokens == 1 and not use.num_missing and not use.borders:
                plain.append((first, source, use.target))
            else:
                borders = [(position - chunk.start, slot) for position, slot in use.borders]
                drafts = chunk.num_drafts > 0
                row = StateRow(first, chunk.num_tokens, source, use.target, use.num_missing, drafts, borders)
                rows.append(row)
            first += chunk.num_tokens
        indices = np.array(plain, dtype=np.int64).reshape(-1, 3).T.copy()
        tokens, sources, targets = (torch.from_numpy(part) for part in indices)
        pieces = StatePieces.of(row.advance for row in rows) if rows else None
        return cls(tokens, sources, targets, rows, pieces)
