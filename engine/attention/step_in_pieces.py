"""A step that is recorded in pieces. What depends on its rows is computed between them, for the rows of each step
that is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from engine.attention.base import AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales

Compute = Callable[..., torch.Tensor]
"""Maps a step and some inputs of its N tokens, [N, ...] each, to a result for each token, [N, ...]."""


class Outside(Protocol):
    """Ends a piece of a recorded step."""

    def __call__(
        self, compute: Compute, shape: tuple[int, ...], dtype: torch.dtype, *inputs: torch.Tensor
    ) -> torch.Tensor:
        """Return [size, *shape], whose first rows are the result of `compute` for the tokens of the current step.

        inputs: [size, ...] each, of all tokens, padding included
        """


class StepInPieces:
    """Implements `AttentionStep` for layers that are recorded."""

    def __init__(
        self,
        batch: AttentionBatch,
        outside: Outside,
        part: Callable[[AttentionStep], AttentionStep],
        latent: int | None,
    ) -> None:
        """batch: with padding, and without rows; part: selects a layer's part of a step; latent: numbers of a
        head's result, if other than those of its query (`AttentionShape.latent`).
        """
        self.batch, self._outside, self._part, self._latent = batch, outside, part, latent

    def outside(
        self, compute: Compute, shape: tuple[int, ...], dtype: torch.dtype, *inputs: torch.Tensor
    ) -> torch.Tensor:
        """Compute something between two pieces, for the tokens of each step (`Outside`)."""
        return self._outside(lambda step, *own: compute(self._part(step), *own), shape, dtype, *inputs)

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `AttentionStep.attend`."""

        def attend(step: AttentionStep, query: torch.Tensor) -> torch.Tensor:
            return step.attend(pages, query, window, scales, sinks)

        _, num_heads, head_dim = query.shape
        return self.outside(attend, (num_heads * (self._latent or head_dim),), query.dtype, query)
