"""Chooses tokens by Triton kernels: sampling parameters lie on the device, and no logits come back from it.

As the same requests decode from step to step, their parameters are sent again only when they change; a row without
penalties costs only its position.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.batch import on_device
from engine.kernels.triton import sample
from engine.sampling.adjust import forbidden_ends, is_adjusted, must_go_on
from engine.sampling.chooser import draws
from engine.sampling.row import SamplingRow
from engine.sampling_params import SamplingParams


class TritonChooser:
    """Implements `Chooser`, with torch's tokens except where the rounding of float64 sums decides."""

    def __init__(self) -> None:
        self._asked: tuple[list[SamplingParams], list[int]] = [], []
        self._tensors: sample.SamplingTensors | None = None

    def adjust(self, logits: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: Collection[int]) -> None:
        """Implement `Chooser`."""
        changes = [
            _changes(at, row, eos_token_ids, logits.shape[1]) for at, row in enumerate(rows) if is_adjusted(row)
        ]
        if changes:
            columns = [np.concatenate(column).view(np.int32) for column in zip(*changes, strict=True)]
            sent = on_device(np.stack(columns), logits.device)  # One transfer for all columns.
            sample.change(logits, *sent[:2], *sent[2:].view(torch.float32))

    def choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Implement `Chooser`."""
        asked = [row.request.sampling for row in rows], [row.request.seed for row in rows]
        if self._tensors is None or asked != self._asked:
            self._asked, self._tensors = asked, _sampling_tensors(rows, logits)
        positions = np.array([row.num_output for row in rows], dtype=np.int64)
        return sample.choose(logits, self._tensors, on_device(positions, logits.device))


class _LogitChanges(NamedTuple):
    """Changes to single logits: columns of E entries."""

    rows: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    repetition: npt.NDArray[np.float32]
    penalty: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]


def _changes(at: int, row: SamplingRow, eos_token_ids: Collection[int], vocab_size: int) -> _LogitChanges:
    """Return the changes that `engine.sampling.adjust` makes to row `at`, one entry per token."""
    params = row.request.sampling
    biases = dict(params.logit_bias)
    if must_go_on(row):
        biases |= dict.fromkeys(forbidden_ends(params, eos_token_ids), -np.inf)
    repeated = _known(row.history() if params.repetition_penalty != 1.0 else [], vocab_size)
    output = row.output() if params.presence_penalty or params.frequency_penalty else []
    seen, counts = np.unique(_known(output, vocab_size), return_counts=True)
    biased = _known([*biases], vocab_size)
    tokens = np.unique(np.concatenate((repeated, seen, biased)))
    changes = _LogitChanges(
        np.full(len(tokens), at, dtype=np.int32),
        tokens.astype(np.int32),
        *(np.full(len(tokens), neutral, dtype=np.float32) for neutral in (1.0, 0.0, 0.0)),
    )
    changes.repetition[np.searchsorted(tokens, repeated)] = params.repetition_penalty
    changes.penalty[np.searchsorted(tokens, seen)] = params.presence_penalty + params.frequency_penalty * counts
    changes.bias[np.searchsorted(tokens, biased)] = [biases[token] for token in biased.tolist()]
    return changes


def _known(tokens: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
    """Return the tokens that have a logit."""
    found = np.array(tokens, dtype=np.int64)
    return found[found < vocab_size]


def _sampling_tensors(rows: Sequence[SamplingRow], logits: torch.Tensor) -> sample.SamplingTensors:
    params, vocab_size = [row.request.sampling for row in rows], logits.shape[1]

    def column(values: Sequence[Any], dtype: Any) -> torch.Tensor:
        return on_device(np.array(values, dtype=dtype), logits.device)

    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.minimum(1 / np.array([p.temperature for p in params]), np.finfo(np.float64).max)
    inverse[[at for at, row in enumerate(rows) if not draws(row)]] = 0.0
    return sample.SamplingTensors(
        seed=column([row.request.seed & 0xFFFFFFFFFFFFFFFF for row in rows], np.uint64).view(torch.int64),
        inverse=on_device(inverse, logits.device),
        top_k=column([p.top_k for p in params], np.int32),
        top_p=column([p.top_p for p in params], np.float64),
        min_p=column([p.min_p for p in params], np.float64),
        draws=bool(inverse.any()),
        cuts=any(draws(row) and _is_cut(row.request.sampling, vocab_size) for row in rows),
    )


def _is_cut(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1.0
