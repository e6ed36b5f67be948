"""Masks of the tokens that grammars allow: computed at once for all rows of a step, and applied to the logits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.pinned import on_device
from engine.grammar.constraint import Constraint, ConstraintStatus
from engine.grammar.failure import GrammarFailure
from engine.sampling.adjust import forbidden_ends
from engine.sampling.row import SamplingRow

if TYPE_CHECKING:
    from llguidance import LLExecutor

Masks = npt.NDArray[np.int32]
"""[rows, words]: bit i of a row says whether token i is allowed, lowest bits first."""


Failures = Mapping[int, GrammarFailure]
"""Rows whose grammar failed, and why."""


class _RequestRows(NamedTuple):
    """The rows of one request: those after the first verify its draft tokens, one more in each row's tail."""

    constraint: Constraint
    start: int
    """Index of the first row."""
    drafts: list[int]

    @property
    def rows(self) -> range:
        return range(self.start, self.start + 1 + len(self.drafts))


class GrammarMasks:
    """Computes masks with llguidance's threads and applies them. One per sampler, used by its thread."""

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos = eos_token_ids
        self._executor: LLExecutor | None = None

    def apply(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Failures:
        """Set what grammars forbid to -inf, in place. Return the rows whose grammar failed, which are unchanged.

        logits: float [R, V]; rows without a grammar are unchanged too, and so are those after a forbidden draft
        token, as their results will be dropped.
        """
        constrained, masks, failed = self.fill(rows)
        if constrained:
            index = on_device(np.array(constrained), logits.device)
            packed = on_device(_bytes(masks), logits.device)
            logits[index] = forbid(logits[index], packed, bits_of_bytes(logits.device))
        return failed

    def fill(self, rows: Sequence[SamplingRow]) -> tuple[list[int], Masks, Failures]:
        """Return the rows with a grammar, their masks, and the rows that failed: their masks forbid nothing."""
        constrained = [index for index, row in enumerate(rows) if row.request.constraint is not None]
        if not constrained:
            return [], np.empty((0, 0), dtype=np.int32), {}
        mine = [rows[index] for index in constrained]
        masks, failed = self._fill(mine)
        for mask, row in zip(masks, mine, strict=True):
            if row.num_output < row.request.sampling.min_tokens:
                _forbid_if_possible(mask, [*forbidden_ends(row.request.sampling, self._eos)])
        return constrained, masks, {constrained[at]: failure for at, failure in failed.items()}

    def _fill(self, rows: Sequence[SamplingRow]) -> tuple[Masks, Failures]:
        """Return the masks of `rows`, with all bits set where nothing is forbidden, and the rows that failed."""
        runs = list(_rows_by_request(rows))
        masks: Masks = np.full((len(rows), runs[0].constraint.num_words), -1, dtype=np.int32)
        statuses = [run.constraint.follow(rows[run.start]) for run in runs]
        self._compute(
            [run for run, status in zip(runs, statuses, strict=True) if status is ConstraintStatus.ALLOWED],
            masks,
        )
        failed: dict[int, GrammarFailure] = {}
        for run, status in zip(runs, statuses, strict=True):
            failure = run.constraint.failure
            if failure is None and not masks[run.start].any():
                failure = GrammarFailure.DEAD_END
            if failure is not None and status is ConstraintStatus.ALLOWED and run.drafts:
                self._compute_singly(run, rows[run.start], masks, failed)
            elif failure is not None:
                failed |= dict.fromkeys(run.rows, failure)
        masks[[*failed]] = -1
        return masks, failed

    def _compute_singly(
        self, run: _RequestRows, first: SamplingRow, masks: Masks, failed: dict[int, GrammarFailure]
    ) -> None:
        """Compute a run's masks one after the other: a draft token may have led to where its grammar failed."""
        from llguidance.numpy import fill_next_token_bitmask

        constraint = run.constraint
        constraint.restart()
        constraint.follow(first)
        masks[run.rows] = -1
        for at, draft in zip(run.rows, [*run.drafts, None], strict=True):
            fill_next_token_bitmask(constraint.matcher, masks, at)
            failure = constraint.failure
            if failure is not None:
                failed[at] = failure
            if failure is not None or draft is None or not constraint.matcher.try_consume_tokens([draft]):
                break
        constraint.restart()

    def _compute(self, runs: Sequence[_RequestRows], masks: Masks) -> None:
        """Compute masks in parallel, without the interpreter's lock."""
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

        self._executor = self._executor or LLExecutor()  # It starts threads, so make it only for grammars.
        plain = [(run.constraint.matcher, run.start) for run in runs if not run.drafts]
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, masks)
        drafted = [(run.constraint.matcher, run.start, run.drafts) for run in runs if run.drafts]
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, masks)


def _rows_by_request(rows: Sequence[SamplingRow]) -> Iterator[_RequestRows]:
    start = 0
    while start < len(rows):
        constraint = rows[start].request.constraint
        assert constraint is not None
        end = start + 1
        while end < len(rows) and rows[end].request.constraint is constraint:
            end += 1
        yield _RequestRows(constraint, start, list(rows[end - 1].tail[len(rows[start].tail) :]))
        start = end


def _forbid_if_possible(mask: npt.NDArray[np.int32], tokens: Sequence[int]) -> None:
    """Forbid `tokens` in a mask, unless it would then allow nothing."""
    known = np.array([token for token in tokens if token < 32 * len(mask)], dtype=np.int32)
    without = mask.copy()
    np.bitwise_and.at(without, known // 32, ~np.left_shift(np.int32(1), known % 32))
    if without.any():
        mask[:] = without


class StaticMasks:
    """Masks on the device for a recorded sampler, in a tensor whose address never changes."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        width = 4 * -(-vocab_size // 32)
        self._packed = torch.full((max_rows, width), 255, dtype=torch.uint8, device=device)
        self._bits = bits_of_bytes(device)
        self._masked: set[int] = set()  # rows of which something is forbidden

    def write(self, rows: Sequence[int], masks: Masks) -> None:
        """Set the masks of these rows; nothing is forbidden in any other row."""
        free = sorted(self._masked.difference(rows))
        self._masked = set(rows)
        places = [*rows, *free]
        if not places:
            return
        width = self._packed.shape[1]
        values = np.full((len(places), width), 255, dtype=np.uint8)
        if rows:
            values[: len(rows)] = _bytes(masks)[:, :width]
        device = self._packed.device
        self._packed.index_copy_(0, on_device(np.array(places), device), on_device(values, device))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Set what is forbidden to -inf in the logits of the first rows, float [R, V], in place; returns them."""
        return forbid(logits, self._packed[: len(logits)], self._bits)


def forbid(logits: torch.Tensor, packed: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Set logits, [R, V], to -inf in place where bits of uint8 [R, V / 8] are 0: byte k has tokens 8k to 8k + 7.
    `bits`: from `bits_of_bytes`.
    """
    allowed = (packed[:, :, None] & bits).flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill_(allowed == 0, -torch.inf)


def bits_of_bytes(device: torch.device) -> torch.Tensor:
    """Return the eight bits of a byte, the lowest first: uint8 [8]."""
    return on_device(np.array([1 << bit for bit in range(8)], dtype=np.uint8), device)


def _bytes(masks: Masks) -> npt.NDArray[np.uint8]:
    return masks.astype("<i4", copy=False).view(np.uint8)
