"""Masks of the tokens that grammars allow: computed together for all rows of a step, and applied to the logits."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.pinned import on_device
from engine.grammar.constraint import Constraint, ConstraintStatus
from engine.grammar.failure import GrammarFailure
from engine.grammar.mask_pace import LATE_SECONDS
from engine.sampling.adjust import forbidden_ends
from engine.values.sampling_row import SamplingRow

if TYPE_CHECKING:
    from llguidance import LLExecutor

_EXAMINED_EVERY = 32
"""Least number of steps between two in which masks are timed one by one."""
Masks = npt.NDArray[np.int32]
"""[rows, words]: bit i of a row says whether token i is allowed, lowest bits first."""


Failures = Mapping[int, GrammarFailure]
"""Rows whose grammar failed, and the reasons."""


class _RequestRows(NamedTuple):
    """The rows of one request. Those after the first verify its draft tokens, with one more in each row's tail."""

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
        self._is_examining = False
        """Whether the next masks are timed one by one."""
        self._num_since = _EXAMINED_EVERY
        """Steps since masks were timed."""

    def apply(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Failures:
        """Set forbidden logits to -inf, in place. Return the rows whose grammar failed, which are unchanged.

        logits: float [R, V]; rows without a grammar are unchanged too, and so are those after a forbidden draft
        token, because their results will be dropped.
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
        failed: dict[int, GrammarFailure] = {}
        now = [run for run in runs if not _take(run, rows[run.start], masks, failed)]
        with ExitStack() as held:
            for run in now:
                held.enter_context(run.constraint.lock)
            self._fill_now(now, rows, masks, failed)
        masks[[*failed]] = -1
        return masks, failed

    def _fill_now(
        self,
        now: Sequence[_RequestRows],
        rows: Sequence[SamplingRow],
        masks: Masks,
        failed: dict[int, GrammarFailure],
    ) -> None:
        """Compute the masks that no other thread has computed."""
        began = time.perf_counter()
        if self._is_examining:
            statuses = [_timed(run, rows[run.start], masks, failed) for run in now]
        else:
            statuses = [run.constraint.follow(rows[run.start]) for run in now]
            allowed = [
                run for run, status in zip(now, statuses, strict=True) if status is ConstraintStatus.ALLOWED
            ]
            self._compute(allowed, masks, failed)
        self._watch(time.perf_counter() - began)
        for run, status in zip(now, statuses, strict=True):
            failure = run.constraint.failure
            if failure is None and not masks[run.start].any():
                failure = GrammarFailure.DEAD_END
            if failure is not None and status is ConstraintStatus.ALLOWED and run.drafts:
                self._compute_again(run, rows[run.start], masks, failed)
            elif failure is not None:
                failed |= dict.fromkeys(run.rows, failure)

    def _watch(self, seconds: float) -> None:
        """Decide whether the next masks are timed one by one, to find the slow ones after a step that waited."""
        was_late, self._num_since = seconds > LATE_SECONDS, self._num_since + 1
        if self._is_examining:
            self._num_since = 0
        self._is_examining = was_late and not self._is_examining and self._num_since > _EXAMINED_EVERY

    def _compute_again(
        self, run: _RequestRows, first: SamplingRow, masks: Masks, failed: dict[int, GrammarFailure]
    ) -> None:
        """Compute a run's masks in turn, because its grammar may have failed after a draft token."""
        run.constraint.restart()
        run.constraint.follow(first)
        masks[run.rows] = -1
        _compute_in_turn(run, masks, failed)
        run.constraint.restart()

    def _compute(self, runs: Sequence[_RequestRows], masks: Masks, failed: dict[int, GrammarFailure]) -> None:
        """Compute llguidance's masks in parallel, without the interpreter's lock, and then xgrammar's."""
        from llguidance import LLExecutor, LLMatcher
        from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

        self._executor = self._executor or LLExecutor()  # Made only for grammars, because it starts threads.
        guided = [(m, run) for run in runs if isinstance(m := run.constraint.matcher, LLMatcher)]
        plain = [(matcher, run.start) for matcher, run in guided if not run.drafts]
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, masks)
        drafted = [(matcher, run.start, run.drafts) for matcher, run in guided if run.drafts]
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, masks)
        for run in runs:
            if not isinstance(run.constraint.matcher, LLMatcher):
                run.constraint.matcher.rollback(_compute_in_turn(run, masks, failed))


def _take(run: _RequestRows, first: SamplingRow, masks: Masks, failed: dict[int, GrammarFailure]) -> bool:
    """Take the mask that a thread has computed; returns whether there was one, or no time is left for another."""
    pace, mask = run.constraint.pace, None
    if not pace.is_over_budget:
        mask = pace.mask(first.num_output) if pace.is_slow and not run.drafts else None
        if mask is None:
            return False
    failure = run.constraint.failure
    if mask:
        masks[run.start] = np.frombuffer(mask, "<i4", count=masks.shape[1])
        failure = failure or (None if masks[run.start].any() else GrammarFailure.DEAD_END)
    if failure is not None:
        failed |= dict.fromkeys(run.rows, failure)
    return True


def _timed(
    run: _RequestRows, first: SamplingRow, masks: Masks, failed: dict[int, GrammarFailure]
) -> ConstraintStatus:
    """Follow a run's history, compute its masks, and record the time."""
    began = time.thread_time()
    status = run.constraint.follow(first)
    if status is ConstraintStatus.ALLOWED:
        run.constraint.matcher.rollback(_compute_in_turn(run, masks, failed))
    run.constraint.pace.took(time.thread_time() - began)
    return status


def _compute_in_turn(run: _RequestRows, masks: Masks, failed: dict[int, GrammarFailure]) -> int:
    """Compute a run's masks, consuming its draft tokens up to the first that is not allowed; returns how many."""
    matcher = run.constraint.matcher
    num_taken = 0
    for at, draft in zip(run.rows, [*run.drafts, None], strict=True):
        masks[at] = np.frombuffer(matcher.compute_bitmask(), "<i4", count=masks.shape[1])
        failure = run.constraint.failure or (None if masks[at].any() else GrammarFailure.DEAD_END)
        if failure is not None:
            failed[at] = failure
        if failure is not None or draft is None or not matcher.try_consume_tokens([draft]):
            break
        num_taken += 1
    return num_taken


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
        self._masked: set[int] = set()  # rows with forbidden tokens

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
        """Set forbidden logits of the first rows, float [R, V], to -inf in place; returns them."""
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
