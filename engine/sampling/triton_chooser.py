"""Chooses tokens with Triton kernels: sampling parameters are on the device, and no logits leave it.

Because the same requests decode from step to step, their parameters are sent again only when they change. A row
without penalties costs only its position; the cost of one with penalties does not depend on the length of its
history.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.pinned import on_device, to_device
from engine.kernels.triton import sample
from engine.sampling.adjust import forbidden_ends, is_adjusted, must_continue
from engine.sampling.chooser import draws
from engine.sampling.token_counts import TokenCounts, is_penalized
from engine.values.sampling_params import SamplingParams
from engine.values.sampling_row import SamplingRow


class TritonChooser:
    """Implements `Chooser`, with torch's tokens except where the rounding of float64 sums decides."""

    def __init__(self) -> None:
        self._asked: tuple[list[SamplingParams], list[int]] = [], []
        self._tensors: sample.SamplingTensors | None = None
        self._counts = TokenCounts()

    def adjust(self, logits: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: Collection[int]) -> None:
        """Implement `Chooser`."""
        penalized = [at for at, row in enumerate(rows) if is_penalized(row.request.sampling)]
        if penalized:
            slots = self._counts.follow([rows[at] for at in penalized], logits)
            asked = _penalties(penalized, slots, rows)
            sample.penalize(logits, self._counts.table, on_device(asked, logits.device))
        edits = [
            _edits(at, row, eos_token_ids, logits.shape[1]) for at, row in enumerate(rows) if is_adjusted(row)
        ]
        if edits:
            columns = [np.concatenate(column).view(np.int32) for column in zip(*edits, strict=True)]
            sent = on_device(np.stack(columns), logits.device)  # One transfer for all columns.
            sample.edit(logits, sent[0], sent[1], sent[2].view(torch.float32))

    def choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Implement `Chooser`."""
        asked = [row.request.sampling for row in rows], [row.request.seed for row in rows]
        if self._tensors is None or asked != self._asked:
            self._asked, self._tensors = asked, _sampling_tensors(rows, logits)
        positions = np.array([row.num_output for row in rows], dtype=np.int64)
        return sample.choose(logits, self._tensors, on_device(positions, logits.device))


class _LogitEdits(NamedTuple):
    """Additions to single logits: columns of E entries."""

    rows: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    bias: npt.NDArray[np.float32]


def _edits(at: int, row: SamplingRow, eos_token_ids: Collection[int], vocab_size: int) -> _LogitEdits:
    """Return the bias and the forbidden ends of row `at`, one entry per token."""
    biases = dict(row.request.sampling.logit_bias)
    if must_continue(row):
        biases |= dict.fromkeys(forbidden_ends(row.request.sampling, eos_token_ids), -np.inf)
    known = {token: bias for token, bias in biases.items() if token < vocab_size}
    return _LogitEdits(
        np.full(len(known), at, dtype=np.int32),
        np.array([*known], dtype=np.int32),
        np.array([*known.values()], dtype=np.float32),
    )


def _penalties(places: Sequence[int], slots: Sequence[int], rows: Sequence[SamplingRow]) -> npt.NDArray[np.int64]:
    """Return the arguments of `engine.kernels.triton.sample.penalize`: the rows at `places`, with their slots."""
    tails = [rows[at].tail for at in places]
    asked = np.full((len(places), 5 + max(map(len, tails))), -1, dtype=np.int64)
    asked[:, 0], asked[:, 1] = places, slots
    params = [rows[at].request.sampling for at in places]
    penalties = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
    asked[:, 2:5] = np.array(penalties, dtype=np.float64).view(np.int64)
    for entry, tail in zip(asked, tails, strict=True):
        entry[5 : 5 + len(tail)] = tail
    return asked


def _sampling_tensors(rows: Sequence[SamplingRow], logits: torch.Tensor) -> sample.SamplingTensors:
    params, vocab_size = [row.request.sampling for row in rows], logits.shape[1]

    def column(values: Sequence[Any], dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=dtype))

    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.minimum(1 / np.array([p.temperature for p in params]), np.finfo(np.float64).max)
    inverse[[at for at, row in enumerate(rows) if not draws(row)]] = 0.0
    tensors = sample.SamplingTensors(
        seed=column([row.request.seed & 0xFFFFFFFFFFFFFFFF for row in rows], np.uint64).view(torch.int64),
        inverse=torch.from_numpy(inverse),
        top_k=column([p.top_k for p in params], np.int32),
        top_p=column([p.top_p for p in params], np.float64),
        min_p=column([p.min_p for p in params], np.float64),
        draws=bool(inverse.any()),
        cuts=any(draws(row) and _is_cut(row.request.sampling, vocab_size) for row in rows),
    )
    return to_device(tensors, logits.device)


def _is_cut(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1.0
