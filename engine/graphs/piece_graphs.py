"""Steps of any rows as pieces of CUDA graphs: the work between the attention of two layers is recorded.

    [ graph ]  attention  [ graph ]  attention  [ graph ]       a step of 37 tokens replays the graphs of 48
     padded     37 tokens   padded

Attention differs from step to step in more than numbers: prompts are cut differently, and the number of rows
varies. So it is launched as without graphs, on the step's own tokens, while the rest depends only on the number of
tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.attention.base import AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales
from engine.attention.layer_groups import GroupedStep, steps_of
from engine.graphs.step_graphs import CutCapture, StepGraphs, next_size
from engine.graphs.step_inputs import StepInputs

_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Possible numbers of tokens; a step takes the next larger one."""

Layers = Callable[[torch.Tensor, AttentionStep], torch.Tensor]
"""Maps int64 token ids [N] and their step to hidden states [N, H]; writes the tokens' KV."""


class PieceGraphs:
    """The graphs of all sizes, for one model."""

    def __init__(
        self,
        layers: Layers,
        max_tokens: int,
        num_heads: int,
        head_dim: int,
        value_dim: int,
        empty_slot: int,
        hidden: torch.Tensor,
        capture: CutCapture,
        num_groups: int = 1,
        above: int = 0,
    ) -> None:
        """num_heads, head_dim, value_dim: of attention's queries, and the numbers of each one's result; hidden:
        [max_tokens, H] at least, for results; num_groups: see `StepInputs`; above: tokens up to which other graphs
        run all steps.
        """
        self._layers, self._hidden, self._cut = layers, hidden, capture.cut
        self._sizes = piece_sizes(max_tokens, above)
        self._num_groups = num_groups
        self._inputs = StepInputs(max_tokens, empty_slot, hidden.device, num_groups=num_groups)
        self._query = hidden.new_zeros(max_tokens, num_heads, head_dim)
        self._attended = hidden.new_zeros(max_tokens, num_heads * value_dim)
        self._step: AttentionStep | None = None
        self.graphs = StepGraphs(self._sizes, self._compute, capture)
        """Each consists of one more CUDA graph than there are layers."""

    def size_of(self, num_tokens: int) -> int | None:
        """Return the size of the graphs for a step; None if there is none."""
        return next_size(self._sizes, num_tokens)

    def hidden(self, ids: torch.Tensor, step: AttentionStep, size: int) -> tuple[torch.Tensor, bool]:
        """Return the hidden states of a step, [N, H], which the next one overwrites, and whether graphs were
        replayed.
        """
        self._inputs.write_tokens(ids, step.batch, size)
        self._step = step
        try:
            is_replayed = self.graphs.run(size)
        finally:
            self._step = None
        return self._hidden[: len(ids)], is_replayed

    @torch.inference_mode()
    def _compute(self, size: int) -> None:
        batch, groups = self._inputs.batch(size), range(self._num_groups)
        steps = [_CutStep(self, batch.of_group(group), group) for group in groups]
        step = steps[0] if self._num_groups == 1 else GroupedStep(steps)
        self._hidden[:size] = self._layers(self._inputs.token_ids(size), step)

    def attend_outside(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales,
        sinks: torch.Tensor | None,
        group: int,
    ) -> torch.Tensor:
        """Compute the current step's attention between two pieces (`AttentionStep.attend`), for a layer of this
        group.

        Queries and results of all layers share their memory, so that layers need none of their own.
        """
        size = len(query)
        self._query[:size] = query
        self._cut(lambda: self._attend(pages, window, scales, sinks, group))
        return self._attended[:size]

    def _attend(
        self, pages: torch.Tensor, window: int | None, scales: KVScales, sinks: torch.Tensor | None, group: int
    ) -> None:
        if self._step is None:  # Only the kernels between attentions run, to record them.
            return
        step = steps_of(self._step)[group]
        count = len(step.batch.positions)
        self._attended[:count] = step.attend(pages, self._query[:count], window, scales, sinks)


class _CutStep:
    """Implements `AttentionStep` for layers that are recorded: a piece ends at attention."""

    def __init__(self, graphs: PieceGraphs, batch: AttentionBatch, group: int) -> None:
        self._graphs, self.batch, self._group = graphs, batch, group

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `AttentionStep.attend`."""
        return self._graphs.attend_outside(pages, query, window, scales, sinks, self._group)


def piece_sizes(max_tokens: int, above: int = 0) -> list[int]:
    """Return the numbers of tokens of graphs for steps of more than `above` and up to `max_tokens`, the last of
    them; none if `max_tokens` is not above `above`.
    """
    sizes = [size for size in _SIZES if size < max_tokens] + [max_tokens]
    return [size for size in sizes if size > above]
