"""Steps of few tokens as CUDA graphs that include attention: each token is a separate row.

    rows      a | b b b | c c c c c        a decode, and prompts of which few tokens are computed
    spread    a | b | b | b | c | c | ...  rows of one token each, and empty ones up to the graph's size

Prompts are cut differently in each step, which changes the attention of ragged rows. For rows with one token only
their number matters, as in steps of decodes. The rows of a prompt share its prefix, so this is for attention that
reads the prefix once for all of them (`AttentionBackend.spreads_prompts`).
"""

from __future__ import annotations

import torch

from engine.attention.batch import AttentionBatch
from engine.graphs.draft_graphs import Layers
from engine.graphs.piece_graphs import piece_sizes
from engine.graphs.step_graphs import Capture, StepGraphs, next_size
from engine.graphs.step_inputs import StepInputs

LONGEST = 128
"""Most tokens of a row; with more, the unshared part of their context would be read too often."""
_MOST_TOKENS = 256
"""Most tokens of a step, which are the rows in which attention looks for shared prefixes."""


class SpreadGraphs:
    """The graphs of all sizes, for one model."""

    def __init__(
        self,
        layers: Layers,
        max_tokens: int,
        max_len: int,
        page_size: int,
        empty_slot: int,
        hidden: torch.Tensor,
        capture: Capture,
    ) -> None:
        """max_tokens: of a step; max_len: most positions of a row; hidden: at least [max_tokens, H], results."""
        self._layers, self._max_len, self._hidden = layers, max_len, hidden
        self._sizes = spread_sizes(max_tokens)
        most, pages = self._sizes[-1], -(-max_len // page_size)
        self._inputs = StepInputs(most, empty_slot, hidden.device, most, pages)
        self.graphs = StepGraphs(self._sizes, self._compute, capture)

    def size_of(self, batch: AttentionBatch) -> int | None:
        """Return the size of the graph for a step; None if there is none."""
        if max(batch.query_lens) > LONGEST or max(batch.kv_lens_host) > self._max_len:
            return None
        return next_size(self._sizes, sum(batch.query_lens))

    def hidden(self, ids: torch.Tensor, batch: AttentionBatch, size: int) -> tuple[torch.Tensor, bool]:
        """Return the hidden states of a step, [N, H], which the next one overwrites, and whether a graph was
        replayed.
        """
        self._inputs.write_tokens(ids, batch, size)
        self._inputs.write_rows(batch.spread(), size)
        is_replayed = self.graphs.run(size)
        return self._hidden[: len(ids)], is_replayed

    @torch.inference_mode()
    def _compute(self, size: int) -> None:
        batch = self._inputs.batch(size, size, 1, self._max_len)
        self._hidden[:size] = self._layers(self._inputs.token_ids(size), batch)


def spread_sizes(max_tokens: int) -> list[int]:
    """Return the numbers of tokens of graphs for steps of up to `max_tokens`, ascending; none for 0."""
    return piece_sizes(min(max_tokens, _MOST_TOKENS))
