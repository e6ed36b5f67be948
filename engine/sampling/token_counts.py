"""Counts the tokens of requests' histories, for penalties, and keeps the counts from step to step.

    counts, int32 [slots, V]    2 * occurrences in the known output, + 1 in a prompt whose tokens matter
    a row's history             [ known: counted in its request's slot | tail: passed separately, a few tokens ]

A request's slot is filled when it first samples, and then gains the tokens that became known since the last step.
So a step costs the same after a thousand tokens and after a hundred thousand. Known tokens never change, even if
the tail does, so no count is ever undone: this one rule covers overlap, preemption, resuming, speculation and
beams.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.pinned import on_device
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from engine.values.sampling_row import SamplingRow

_Counts = npt.NDArray[np.int32]


def is_penalized(params: SamplingParams) -> bool:
    """Whether tokens that occurred before change the logits."""
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


@dataclass(slots=True)
class _Slot:
    """The owner of a row of the table. It does not keep a request that ended alive."""

    owner: weakref.ref[Request]
    key: int
    """The owner's `id`."""
    num_counted: int = 0
    """Number of leading tokens of the owner that are counted."""
    last_step: int = 0


class TokenCounts:
    """The counts of the requests that have penalties. For one thread at a time.

    It has as many slots as the most penalized requests of any step, each with 4 bytes per token of the vocabulary.
    A request loses its slot when it ends, or when others need it in a step that it is not part of; when it samples
    again, it is counted again, in O(its tokens).
    """

    def __init__(self) -> None:
        self.table = torch.empty((0, 0), dtype=torch.int32)
        """int32 [slots, V], on the device of the logits."""
        self._slots: list[_Slot] = []
        self._slot_of: dict[int, int] = {}
        self._step = 0

    def follow(self, rows: Sequence[SamplingRow], logits: torch.Tensor) -> list[int]:
        """Count the rows' known tokens and return their slots in `table`. logits: [R, V]; only V and the device
        matter.

        O(tokens that became known), except for requests without a slot. Tokens without a logit are not counted.
        """
        if self.table.shape[1] != logits.shape[1] or self.table.device != logits.device:
            self.table = torch.empty((0, logits.shape[1]), dtype=torch.int32, device=logits.device)
            self._slots, self._slot_of = [], {}
        self._step += 1
        entering = {row.request: row for row in rows if not self._is_held(row)}
        if entering:
            self._enter(list(entering.values()))
        found = [self._slot_of[id(row.request)] for row in rows]
        self._count_new(rows, found)
        return found

    def _is_held(self, row: SamplingRow) -> bool:
        """Whether the row's request has a slot, which it then keeps during this step."""
        place = self._slot_of.get(id(row.request))
        if place is None:
            return False
        slot = self._slots[place]
        if slot.owner() is not row.request or slot.num_counted > row.num_known:
            return False
        slot.last_step = self._step
        return True

    def _count_new(self, rows: Sequence[SamplingRow], places: Sequence[int]) -> None:
        """Count the tokens that became known since the last step."""
        vocab_size = self.table.shape[1]
        cells: list[int] = []
        for row, place in zip(rows, places, strict=True):
            slot = self._slots[place]
            if slot.num_counted < row.num_known:
                known = row.request.tokens[slot.num_counted : row.num_known]
                cells += [place * vocab_size + token for token in known if 0 <= token < vocab_size]
                slot.num_counted = row.num_known
        if cells:
            added = on_device(np.array(cells, dtype=np.int64), self.table.device)
            self.table.view(-1).index_add_(0, added, self.table.new_full((1,), 2).expand(len(cells)))

    def _enter(self, rows: Sequence[SamplingRow]) -> None:
        """Give slots to requests without one: those of ended requests first, then of others not in this step."""
        free = [place for place, slot in enumerate(self._slots) if slot.last_step < self._step]
        free.sort(key=lambda place: (self._slots[place].owner() is not None, self._slots[place].last_step))
        if len(rows) > len(free):
            num_held = len(self._slots)
            grown = self.table.new_zeros((num_held + len(rows) - len(free), self.table.shape[1]))
            grown[:num_held] = self.table
            self.table = grown
            free += range(num_held, len(grown))
        for row, place in zip(rows, free, strict=False):
            slot = _Slot(weakref.ref(row.request), id(row.request), row.num_known, self._step)
            if place == len(self._slots):
                self._slots.append(slot)
            else:
                if self._slot_of.get(self._slots[place].key) == place:
                    del self._slot_of[self._slots[place].key]
                self._slots[place] = slot
            self._slot_of[slot.key] = place
            self.table[place] = on_device(_counted(row, self.table.shape[1]), self.table.device)


def _counted(row: SamplingRow, vocab_size: int) -> _Counts:
    """Count the row's known tokens: int32 [V]."""
    request, num_prompt = row.request, row.request.num_prompt
    output = _with_logit(request.tokens[num_prompt : row.num_known], vocab_size)
    counts: _Counts = 2 * np.bincount(output, minlength=vocab_size).astype(np.int32)
    if request.sampling.repetition_penalty != 1.0:
        counts[_with_logit(request.tokens[: min(num_prompt, row.num_known)], vocab_size)] |= 1
    return counts


def _with_logit(tokens: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
    found = np.array(tokens, dtype=np.int64)
    return found[(found >= 0) & (found < vocab_size)]
