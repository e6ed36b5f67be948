"""Attention of models whose layers with a window have their own page tables: a step for each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.attention.base import AttentionBackend, AttentionShape, AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales


class GroupedAttention:
    """A backend for such models, which consists of one for layers without a window and one for the others."""

    spreads_prompts = False

    def __init__(self, whole: AttentionBackend, windowed: AttentionBackend) -> None:
        self._whole, self._windowed = whole, windowed
        self.name = whole.name
        self.is_capturable = whole.is_capturable and windowed.is_capturable
        self.captures_prompts = whole.captures_prompts and windowed.captures_prompts
        self.plans_by_bounds = whole.plans_by_bounds or windowed.plans_by_bounds

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Return that it cannot be chosen by itself; its parts report whether they can run."""
        return "it consists of two other backends"

    def prepare(self, batch: AttentionBatch, null_page: int) -> GroupedStep:
        """Prepare the step for each group."""
        assert batch.more_tables is not None
        more = [
            self._windowed.prepare(batch.of_group(group), null_page)
            for group in range(1, len(batch.more_tables) + 1)
        ]
        return GroupedStep([self._whole.prepare(batch, null_page), *more])


class GroupedStep:
    """One step's batch. It attends for layers without a window; the decoder uses each group's own step."""

    def __init__(self, steps: Sequence[AttentionStep]) -> None:
        self.steps = steps
        """The step of each group."""

    @property
    def batch(self) -> AttentionBatch:
        """Implement `AttentionStep`."""
        return self.steps[0].batch

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `AttentionStep`."""
        return self.steps[0].attend(pages, query, window, scales, sinks)


def steps_of(step: AttentionStep) -> Sequence[AttentionStep]:
    """Return the step of each group of layers."""
    return step.steps if isinstance(step, GroupedStep) else (step,)


def shapes(shape: AttentionShape) -> tuple[AttentionShape, AttentionShape]:
    """Return the shape of the layers without a window, and that of the others, whose page tables do not begin with
    shared prefixes, because the window has passed these.
    """
    none = frozenset({None})
    windowed = replace(shape, windows=shape.windows - none or none, is_cascade=False)
    return replace(shape, windows=none), windowed
