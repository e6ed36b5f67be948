"""Steps of rows with a few tokens each as CUDA graphs: those that verify drafts, those of draft models and layers,
and those of a pipeline's stages.

    rows x width    [ t d d . ]     a row has up to `width` tokens: its last one, and its draft tokens
                    [ t d d d ]     rows are ragged: their tokens follow each other, and padding is at the end
                    [ . . . . ]

Attention is recorded too, so that the host launches one graph for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from engine.attention.batch import AttentionBatch
from engine.graphs.state_inputs import StateInputs
from engine.graphs.step_graphs import Capture, StepGraphs, next_size, sizes_up_to
from engine.graphs.step_inputs import StepInputs

_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Possible numbers of rows."""
_MAX_TOKENS = 512
"""Most tokens of a graph, including padding."""
_FREE_TOKENS = 128
"""Padding up to so many tokens is nearly free, because reading the weights takes longer than multiplying."""

Layers = Callable[[torch.Tensor, AttentionBatch], torch.Tensor]
"""Maps int64 token ids [N] and their batch to hidden states [N, H]; writes the tokens' KV."""


class DraftSize(NamedTuple):
    """The size of a graph."""

    rows: int
    width: int
    """Most tokens of a row."""

    @property
    def num_tokens(self) -> int:
        """Tokens, including padding."""
        return self.rows * self.width


class DraftGraphs:
    """The graphs of all sizes, for one model."""

    def __init__(
        self,
        layers: Layers,
        sizes: Sequence[DraftSize],
        max_len: int,
        page_size: int,
        empty_slot: int,
        hidden: torch.Tensor,
        capture: Capture,
        num_groups: int = 1,
        states: StateInputs | None = None,
    ) -> None:
        """sizes: from `draft_sizes` or `stage_sizes`; max_len: most positions of a row; hidden: [N, H], for the
        results of as many tokens as the largest graph has; num_groups: see `StepInputs`; states: for a model with
        recurrent layers.
        """
        self._layers, self._max_len, self._hidden, self._states = layers, max_len, hidden, states
        self._sizes = sizes
        most = max(size.rows for size in self._sizes)
        pages = -(-max_len // page_size)
        self._inputs = StepInputs(len(hidden), empty_slot, hidden.device, most, pages, num_groups)
        self.graphs = StepGraphs(self._sizes, self._compute, capture)

    def size_of(self, batch: AttentionBatch) -> DraftSize | None:
        """Return the size of the graph for a step; None if there is none, or too much of it would be padding."""
        num_rows, longest = len(batch.query_lens), max(batch.query_lens)
        if batch.states is not None:
            longest = max([longest, *(row.num_replayed + 1 for row in batch.states.rows)])
        width = next_size(sorted({size.width for size in self._sizes}), longest)
        rows = next_size([size.rows for size in self._sizes if size.width == width], num_rows)
        if width is None or rows is None or max(batch.kv_lens_host) > self._max_len:
            return None
        if batch.states is not None and not StateInputs.fits(batch.states, width):
            return None
        size = DraftSize(rows, width)
        is_full = 2 * sum(batch.query_lens) >= size.num_tokens
        return size if is_full or size.num_tokens <= _FREE_TOKENS else None

    def hidden(self, ids: torch.Tensor, batch: AttentionBatch, size: DraftSize) -> tuple[torch.Tensor, bool]:
        """Return the hidden states of a step, [N, H], which the next one overwrites, and whether a graph was
        replayed.
        """
        self._inputs.write_tokens(ids, batch, size.num_tokens)
        self._inputs.write_rows(batch, size.rows)
        if self._states is not None and batch.states is not None:
            self._states.write(batch.states, size.rows)
        is_replayed = self.graphs.run(size)
        return self._hidden[: len(ids)], is_replayed

    @torch.inference_mode()
    def _compute(self, size: DraftSize) -> None:
        count = size.num_tokens
        batch = self._inputs.batch(count, size.rows, size.width, self._max_len)
        if self._states is not None:
            batch = replace(batch, states=self._states.batch(size.rows, size.width))
        self._hidden[:count] = self._layers(self._inputs.token_ids(count), batch)


def stage_sizes(widths: Sequence[int], max_rows: int) -> list[DraftSize]:
    """Return the sizes for a stage of a pipeline: also those of steps in which each row has one token."""
    return [DraftSize(rows, 1) for rows in sizes_up_to(max_rows)] + draft_sizes(widths, max_rows)


def draft_sizes(widths: Sequence[int], max_rows: int) -> list[DraftSize]:
    """Return the sizes for rows of up to so many tokens and up to `max_rows` requests, ascending in both."""
    counts = [count for count in _ROWS if count < max_rows]
    if max_rows <= _ROWS[-1]:
        counts.append(max_rows)
    sizes = (DraftSize(count, width) for width in sorted(set(widths)) for count in counts)
    return [size for size in sizes if size.rows == 1 or size.num_tokens <= _MAX_TOKENS]
