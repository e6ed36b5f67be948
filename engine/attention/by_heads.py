"""Attention in models whose layers have different heads (Gemma 4): a backend for each kind, one step for all."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.attention.base import AttentionBackend, AttentionShape, AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales

KVShape = tuple[int, int, int]
"""The shape of a token's KV in a layer (`AttentionConfig.kv_shape`), which identifies the kind of heads."""


class AttentionByHeads:
    """Several backends as one, each for layers of one kind."""

    spreads_prompts = False

    def __init__(self, backends: Mapping[KVShape, AttentionBackend]) -> None:
        self._backends = backends
        self.is_capturable = all(backend.is_capturable for backend in backends.values())
        self.captures_prompts = all(backend.captures_prompts for backend in backends.values())
        self.plans_by_bounds = any(backend.plans_by_bounds for backend in backends.values())
        self.name = " and ".join(dict.fromkeys(backend.name for backend in backends.values()))

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Return that it cannot be chosen by itself; its backends report whether they can run."""
        return "it consists of other backends"

    def prepare(self, batch: AttentionBatch, null_page: int) -> StepByHeads:
        """Prepare the step for layers of all kinds."""
        return StepByHeads({kind: each.prepare(batch, null_page) for kind, each in self._backends.items()})


class StepByHeads:
    """One step's batch. Each layer uses the part for its kind of heads."""

    def __init__(self, steps: Mapping[KVShape, AttentionStep]) -> None:
        self.of = steps
        """The step for layers of each kind."""
        self.batch = next(iter(steps.values())).batch

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `AttentionStep`; the shape of the layer's pages selects the part."""
        kind = len(pages), pages.shape[3], pages.shape[4]
        return self.of[kind].attend(pages, query, window, scales, sinks)
