"""Steps of any rows as pieces of CUDA graphs: the work between the attention of two layers is recorded.

    [ graph ]  attention  [ graph ]  states  [ graph ]       a step of 37 tokens replays the graphs of 48
     padded     37 tokens   padded  37 tokens  padded

Attention differs from step to step in more than numbers: prompts are cut differently, and the number of rows
varies. So it is launched as without graphs, on the step's own tokens, while the rest depends only on the number of
tokens. The same goes for the states of recurrent layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.attention.base import AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.chunked import ChunkedStep, cut_of
from engine.attention.layer_groups import GroupedStep, steps_of
from engine.attention.step_in_pieces import Compute, StepInPieces
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
        latent: int | None,
        empty_slot: int,
        hidden: torch.Tensor,
        capture: CutCapture,
        num_groups: int = 1,
        above: int = 0,
        *,
        has_chunks: bool = False,
    ) -> None:
        """latent: as of `StepInPieces`; hidden: [max_tokens, H] at least, for results; num_groups: as of
        `StepInputs`; above: tokens up to which other graphs run all steps; has_chunks: whether some layers attend
        within chunks.
        """
        self._layers, self._hidden, self._cut = layers, hidden, capture.cut
        self._sizes, self._max_tokens = piece_sizes(max_tokens, above), max_tokens
        self._num_groups, self._latent, self._has_chunks = num_groups, latent, has_chunks
        self._inputs = StepInputs(max_tokens, empty_slot, hidden.device, num_groups=num_groups)
        self._memory: dict[tuple[object, ...], torch.Tensor] = {}
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
        self._hidden[:size] = self._layers(self._inputs.token_ids(size), self._in_pieces(size))

    def _in_pieces(self, size: int) -> AttentionStep:
        batch = self._inputs.batch(size)
        steps = [self._step_of(batch, group) for group in range(self._num_groups)]
        return steps[0] if self._num_groups == 1 else GroupedStep(steps)

    def _step_of(self, batch: AttentionBatch, group: int) -> AttentionStep:
        def part(step: AttentionStep) -> AttentionStep:
            return steps_of(step)[group]

        own = batch.of_group(group)
        whole = StepInPieces(own, self._outside, part, self._latent)
        if not self._has_chunks:
            return whole
        return ChunkedStep(whole, StepInPieces(own, self._outside, lambda step: cut_of(part(step)), self._latent))

    def _outside(
        self, compute: Compute, shape: tuple[int, ...], dtype: torch.dtype, *inputs: torch.Tensor
    ) -> torch.Tensor:
        """Implement `Outside`. Inputs and results of all layers share their memory, so that layers need none of
        their own.
        """
        size = len(inputs[0])
        kept = [self._memory_for(at, part.shape[1:], part.dtype)[:size] for at, part in enumerate(inputs)]
        for memory, part in zip(kept, inputs, strict=True):
            memory.copy_(part)
        result = self._memory_for(None, shape, dtype)[:size]

        def run() -> None:
            if self._step is None:  # Only the recorded kernels run, to record them.
                return
            count = len(self._step.batch.positions)
            result[:count] = compute(self._step, *(part[:count] for part in kept))

        self._cut(run)
        return result

    def _memory_for(self, input_number: int | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return [max_tokens, *shape] for one of the inputs, or for a result. Steps run before they are recorded,
        so graphs find it allocated.
        """
        key = input_number, shape, dtype
        if key not in self._memory:
            self._memory[key] = torch.zeros((self._max_tokens, *shape), dtype=dtype, device=self._hidden.device)
        return self._memory[key]


def piece_sizes(max_tokens: int, above: int = 0) -> list[int]:
    """Return the numbers of tokens of graphs for steps of more than `above` and up to `max_tokens`, the last of
    them; none if `max_tokens` is not above `above`.
    """
    sizes = [size for size in _SIZES if size < max_tokens] + [max_tokens]
    return [size for size in sizes if size > above]
