"""What a chunk does with recurrent states, in a model that has them."""

from __future__ import annotations

from engine.structs import Struct


class StateUse(Struct, frozen=True, gc=False):
    """Slots that a chunk reads and writes.

    tokens:  [ in `source` | replayed | this chunk                              ]
                                       borders ── their slots      the end ── `target`
    """

    source: int | None
    """Slot with the state before the chunk, or before the tokens that are replayed; None: before a text."""
    target: int
    """Slot for the state after the chunk. With draft tokens: after those that are replayed, as it is not known yet
    how many of the chunk's tokens are right."""
    num_replayed: int = 0
    """Tokens before the chunk that the state in `source` lacks: drafts of the step before, which are right."""
    borders: tuple[tuple[int, int], ...] = ()
    """Positions within the chunk, ascending, at which the state is kept in a slot as well, and the slots."""
