"""The use of recurrent states' slots by the rows of a step's batch.

a decode            [ x ]              its state advances by one token
a prompt            [ a b c | d e ]    its state is also kept at borders, for prompts that begin alike
with draft tokens   [ b c | x d d ]    drafts of the previous step, b and c, are applied; those of this one are not

In steps with such replayed tokens, they are put before their rows' own tokens.
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
    """Index of its first token in the step, in which replayed tokens do not count."""
    begin: int
    """Index of its first token, a replayed one if it has any, where these count too."""
    num_tokens: int
    """Number of its tokens, without replayed ones."""
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
        return Advance(self.begin, num_tokens, self.source, [*kept, (last, self.target)])


@dataclass(frozen=True, slots=True)
class Replays:
    """The D replayed tokens of a step, which has N tokens of its own."""

    slots: torch.Tensor
    """int64 [D]: the slot in which each of them is kept."""
    positions: torch.Tensor
    """int64 [D]: its position among the drafts of that slot."""
    places: torch.Tensor
    """int64 [D]: its index among all D + N tokens."""
    others: torch.Tensor
    """int64 [N]: the index of each of the step's own tokens among all D + N."""

    @classmethod
    def of(cls, rows: Sequence[StateRow], num_tokens: int) -> Replays | None:
        """Return those of a step's rows, on the host; None if there are none."""
        count = sum(row.num_replayed for row in rows)
        if not count:
            return None
        replayed = [
            (row.source, position, row.begin + position) for row in rows for position in range(row.num_replayed)
        ]
        slots, positions, places = np.array(replayed, dtype=np.int64).T.copy()
        others = np.setdiff1d(np.arange(count + num_tokens), places, assume_unique=True)
        return cls(*map(torch.from_numpy, (slots, positions, places, others)))

    def joined(self, replayed: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Put both kinds of tokens, [D, numbers] and [N, numbers], in their order; return [D + N, numbers]."""
        together = others.new_empty(len(replayed) + len(others), others.shape[1])
        together.index_copy_(0, self.places, replayed.to(others.dtype))
        return together.index_copy_(0, self.others, others)


@dataclass(frozen=True, slots=True)
class Drafts:
    """The draft tokens of a step, and the token before them in each row: the next step may replay them."""

    tokens: torch.Tensor
    """int64 [E]: the index of each in the step, in which replayed tokens do not count."""
    slots: torch.Tensor
    """int64 [E]: the slot in which it is kept."""
    positions: torch.Tensor
    """int64 [E]: its position among the drafts of that slot."""

    @classmethod
    def of(cls, rows: Sequence[StateRow]) -> Drafts | None:
        """Return those of a step's rows, on the host; None if there are none."""
        kept = [
            (row.first + position, row.target, position)
            for row in rows
            if row.has_drafts
            for position in range(row.num_tokens)
        ]
        if not kept:
            return None
        return cls(*map(torch.from_numpy, np.array(kept, dtype=np.int64).T.copy()))


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The use of states in one step."""

    plain: torch.Tensor
    """int64 [D]: the tokens of rows that advance by one token, by their index in the step. A step with any has no
    replayed tokens."""
    sources: torch.Tensor
    """int64 [D]: slots with the states before them."""
    targets: torch.Tensor
    """int64 [D]: slots for the states after them."""
    rows: Sequence[StateRow]
    """All other rows, on the host; none in graphs, which have their tables."""
    numbers: torch.Tensor | None = None
    """int64 [R, 6]: of each of these rows, and then of those of `plain`, first, num_tokens, source, target,
    num_replayed and whether it has drafts. None in graphs."""
    pieces: StatePieces | None = None
    """All tokens of these rows, and then those of `plain`; None if these are all."""
    replays: Replays | None = None
    drafts: Drafts | None = None

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
        # Graphs of steps with drafts take all rows alike.
        has_plain = not any(chunk.num_drafts or (chunk.state and chunk.state.num_missing) for chunk in chunks)
        first = num_replayed = 0
        for chunk in chunks:
            use = chunk.state or StateStep(0 if chunk.start else None, 0, 0, ())
            source = null_slot if use.source is None else use.source
            if has_plain and chunk.num_tokens == 1 and not use.borders:
                plain.append((first, source, use.target))
            else:
                borders = [(position - chunk.start, slot) for position, slot in use.borders]
                drafts = chunk.num_drafts > 0
                begin, count = first + num_replayed, chunk.num_tokens
                rows.append(StateRow(first, begin, count, source, use.target, use.num_missing, drafts, borders))
                num_replayed += use.num_missing
            first += chunk.num_tokens
        return cls.of(rows, first, plain)

    @classmethod
    def of(
        cls, rows: Sequence[StateRow], num_tokens: int, plain: Sequence[tuple[int, int, int]] = ()
    ) -> StateBatch:
        """Return the batch of a step of so many tokens, on the host. `plain`: for each row that advances by one
        token, the index of that token in the step, and the slots with the states before and after it.
        """
        indices = np.array(plain, dtype=np.int64).reshape(-1, 3).T.copy()
        tokens, sources, targets = (torch.from_numpy(part) for part in indices)
        listed = [
            *(
                (row.first, row.num_tokens, row.source, row.target, row.num_replayed, int(row.has_drafts))
                for row in rows
            ),
            *((token, 1, source, target, 0, 0) for token, source, target in plain),
        ]
        numbers = torch.from_numpy(np.array(listed, dtype=np.int64))
        if not rows:
            return cls(tokens, sources, targets, rows, numbers)
        return cls(
            tokens,
            sources,
            targets,
            rows,
            numbers,
            StatePieces.of(
                [
                    *(row.advance for row in rows),
                    *(Advance(token, 1, source, [(1, target)]) for token, source, target in plain),
                ]
            ),
            Replays.of(rows, num_tokens),
            Drafts.of(rows),
        )
