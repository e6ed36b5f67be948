"""The interface between the sampler and the device: the part of sampling that works on whole rows of logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from engine.sampling.adjust import adjust, is_adjusted
from engine.sampling.beam_candidates import is_beam_row
from engine.sampling.distribution import draw, probabilities
from engine.sampling.noise import uniform
from engine.values.sampling_row import SamplingRow

INVALID = -1
"""Returned instead of a token if the row's logits hold NaN or infinity, or every token was forbidden."""


class Chooser(Protocol):
    """Adjusts rows of logits as their requests ask, and chooses their tokens. For one thread at a time."""

    def adjust(self, logits: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: Collection[int]) -> None:
        """Apply each row's penalties, bias and forbidden ends (`engine.sampling.adjust`) to float32 [R, V]."""

    def choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Return the token under each row's noise, or `INVALID`: int64 [R] on the logits' device.

        Greedy rows and rows of beam searches get their most likely token, the lowest id among equals.
        """


class TorchChooser:
    """The chooser that runs everywhere; tests compare the others with it."""

    def adjust(self, logits: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: Collection[int]) -> None:
        """Implement `Chooser`."""
        for index, row in enumerate(rows):
            if is_adjusted(row):
                adjust(logits[index], row, eos_token_ids)

    def choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Implement `Chooser`."""
        best, tokens = logits.max(-1)  # NaN and infinity win the maximum
        valid = torch.isfinite(best)
        drawing = [index for index, row in enumerate(rows) if draws(row)]
        if drawing:
            drawing = [index for index, is_valid in zip(drawing, valid[drawing].tolist(), strict=True) if is_valid]
        if drawing:
            tokens[drawing] = _draw_rows(logits[drawing], [rows[index] for index in drawing])
        return torch.where(valid, tokens, INVALID)


def draws(row: SamplingRow) -> bool:
    """Whether noise decides this row's token."""
    return not (row.request.sampling.is_greedy or is_beam_row(row))


def _draw_rows(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    noise = uniform([row.request.seed for row in rows], [row.num_output for row in rows])
    weights = probabilities(logits, [row.request.sampling for row in rows])
    return draw(weights, torch.from_numpy(noise).to(logits.device))
