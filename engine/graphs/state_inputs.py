"""The use of recurrent states by the rows of a recorded step with draft tokens, or of a pipeline's stage.

The host writes six numbers of each row; the graph itself makes the tables of `StateBatch` from these. A row has at
most `width` tokens, and replays at most `width - 1`, so the tables have fixed sizes:

    all tokens    [ r a a a | b | r r c c | . . | . . . ]      r: replayed      padding of both kinds is at the end
    pieces        [ r | a a a ][ b | ][ r r | c c ][ | ]       two of each row: the state is kept after the first

If rows have one token, all advance by it, without pieces.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.pinned import on_device
from engine.attention.state_batch import Drafts, Replays, StateBatch
from engine.kernels.delta_pieces import PIECE, StatePieces

MOST_WIDTH = (PIECE + 1) // 2
"""Most tokens of a row, so that they fill at most one piece with those that are replayed."""


class StateInputs:
    """The rows of steps of up to `max_rows` rows, in a tensor with a fixed address."""

    def __init__(self, max_rows: int, empty_slot: int, device: torch.device) -> None:
        """empty_slot: the slot that padding reads and writes."""
        self._padding = on_device(np.array([0, 0, empty_slot, empty_slot, 0, 0]), device)
        self._rows = self._padding.repeat(max_rows, 1)
        self._empty_slot = empty_slot

    @staticmethod
    def fits(batch: StateBatch, width: int) -> bool:
        """Whether graphs of this width can compute the step."""
        return all(not row.borders and row.num_replayed < width for row in batch.rows)

    def write(self, batch: StateBatch, size: int) -> None:
        """Write a step's rows, and pad them to `size`."""
        assert batch.numbers is not None, "a step has rows"
        count = len(batch.numbers)
        self._rows[:count] = batch.numbers
        if count < size:
            self._rows[count:size] = self._padding

    def batch(self, num_rows: int, width: int) -> StateBatch:
        """Return the use of states in a step of `num_rows` rows of up to `width` tokens, padding included."""
        first, count, source, target, replayed, has_drafts = rows = self._rows[:num_rows].unbind(1)
        device, num_tokens = first.device, num_rows * width
        number = torch.arange(num_rows, device=device)
        if width == 1:
            return StateBatch(number, source.contiguous(), target.contiguous(), ())
        begin = first + replayed.cumsum(0) - replayed
        kept_after = torch.where(has_drafts > 0, replayed, replayed + count)
        end = begin + kept_after
        no_slot = torch.full_like(rows[0], -1)
        before = torch.stack((begin, kept_after, number, target), 1)
        after = torch.stack((end, replayed + count - kept_after, number, no_slot), 1)
        pieces = StatePieces(
            torch.stack((before, after), 1).flatten(0, 1),
            torch.stack((begin, source, 2 * number, 2 * number + 2), 1),
            torch.stack((number, end, target), 1),
        )
        none = first[:0]
        drafts = self._drafts(first, count, target, has_drafts, width)
        replays = self._replays(first, begin, source, replayed, width, num_tokens)
        return StateBatch(none, none, none, (), None, pieces, replays, drafts)

    def _replays(
        self,
        first: torch.Tensor,
        begin: torch.Tensor,
        source: torch.Tensor,
        replayed: torch.Tensor,
        width: int,
        num_tokens: int,
    ) -> Replays:
        position = torch.arange(width - 1, device=first.device).expand(len(first), -1)
        is_real = position < replayed[:, None]
        # The places after all real tokens are those of padding, in any order.
        padding = num_tokens + replayed.sum() + (~is_real).flatten().cumsum(0).view_as(is_real) - 1
        places = torch.where(is_real, begin[:, None] + position, padding)
        slots = torch.where(is_real, source[:, None], self._empty_slot)
        token = torch.arange(num_tokens, device=first.device)
        others = token + ((first <= token[:, None]) * replayed).sum(1)
        return Replays(slots.flatten(), position.flatten(), places.flatten(), others)

    def _drafts(
        self, first: torch.Tensor, count: torch.Tensor, target: torch.Tensor, has_drafts: torch.Tensor, width: int
    ) -> Drafts:
        position = torch.arange(width, device=first.device).expand(len(first), -1)
        is_real = (position < count[:, None]) & (has_drafts > 0)[:, None]
        tokens = torch.where(is_real, first[:, None] + position, 0)
        slots = torch.where(is_real, target[:, None], self._empty_slot)
        return Drafts(tokens.flatten(), slots.flatten(), position.flatten())
