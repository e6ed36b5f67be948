"""What constrained rows may choose from: all their masks at once, and their logits cut to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from engine.grammar.constraint import Constraint, Footing

Masks = npt.NDArray[np.int32]
"""[rows, words]: bit i of a row says whether token i is allowed, lowest bits first."""


@dataclass(frozen=True, slots=True)
class ConstrainedRow:
    """A row of logits, and the history its token comes after: output `tokens[start:end]`, then `tail`."""

    row: int
    constraint: Constraint
    tokens: Sequence[int]
    start: int
    end: int
    tail: Sequence[int] = ()
    forbidden_ends: Sequence[int] = ()
    """Tokens that it should not end with yet; it ends with them all the same when nothing else is allowed."""

    @property
    def history(self) -> tuple[Sequence[int], int, int, Sequence[int]]:
        """What `Constraint.follow` takes."""
        return self.tokens, self.start, self.end, self.tail


_Group = tuple[int, list[int]]


class GrammarMasks:
    """Computes masks with llguidance's threads and applies them. One per sampler."""

    def __init__(self) -> None:
        self._executor = LLExecutor()

    def apply(self, logits: torch.Tensor, rows: Sequence[ConstrainedRow]) -> list[int]:
        """Set what grammars forbid to -inf, in place. Returns the rows whose grammar failed, which are left alone.

        logits: float [R, V]. Rows of one request, which verify its drafts, follow each other, each tail one token
        longer than the one before; those after a draft that the grammar forbids are left alone too, as nobody will
        see what comes of them.
        """
        groups = list(_groups(rows))
        masks: Masks = np.full((len(rows), rows[0].constraint.num_words), -1, dtype=np.int32)
        footings = [rows[at].constraint.follow(*rows[at].history) for at, _ in groups]
        followed = [group for group, footing in zip(groups, footings, strict=True) if footing is Footing.FOLLOWED]
        self._fill(masks, rows, followed)
        failed = [
            row
            for (at, drafts), footing in zip(groups, footings, strict=True)
            if footing is Footing.BROKEN or rows[at].constraint.has_failed
            for row in range(at, at + 1 + len(drafts))
        ]
        masks[failed] = -1
        for mask, row in zip(masks, rows, strict=True):
            if row.forbidden_ends:
                _forbid_if_possible(mask, row.forbidden_ends)
        index = torch.tensor([row.row for row in rows], device=logits.device)
        logits[index] = logits[index].masked_fill_(_forbidden(masks, logits), -torch.inf)
        return [rows[at].row for at in failed]

    def _fill(self, masks: Masks, rows: Sequence[ConstrainedRow], groups: Sequence[_Group]) -> None:
        """In parallel, without the interpreter's lock."""
        plain = [(rows[at].constraint.matcher, at) for at, drafts in groups if not drafts]
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, masks)
        drafted = [(rows[at].constraint.matcher, at, drafts) for at, drafts in groups if drafts]
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, masks)


def _groups(rows: Sequence[ConstrainedRow]) -> Iterator[_Group]:
    """The rows of each request: index of the first, and the drafts that the others add to it one by one."""
    at = 0
    while at < len(rows):
        end = at + 1
        while end < len(rows) and rows[end].constraint is rows[at].constraint:
            end += 1
        yield at, list(rows[end - 1].tail[len(rows[at].tail) :])
        at = end


def _forbid_if_possible(mask: npt.NDArray[np.int32], tokens: Sequence[int]) -> None:
    """Take `tokens` out of a mask that allows something else as well."""
    words, bits = np.array(tokens) // 32, np.left_shift(np.int32(1), np.array(tokens, dtype=np.int32) % 32)
    without = mask.copy()
    np.bitwise_and.at(without, words, ~bits)
    if without.any():
        mask[:] = without


def _forbidden(masks: Masks, logits: torch.Tensor) -> torch.Tensor:
    """bool [rows, V] on the logits' device, to which only the bits travel: byte k has tokens 8k to 8k + 7."""
    packed = torch.from_numpy(masks.astype("<i4", copy=False).view(np.uint8)).to(logits.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (packed[:, :, None] >> shifts) & 1
    return bits.flatten(1)[:, : logits.shape[1]] == 0
