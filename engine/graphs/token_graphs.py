"""The graphs of steps that are no plain decodes, and the choice of one for a step.

draft tokens, or a stage of a pipeline    a graph for so many rows of a few tokens each
few tokens of prompts, with decodes       a graph in which each token is a row, if attention supports it
other short prompts                       graphs in pieces, with attention between them
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.attention.base import AttentionStep
from engine.attention.batch import AttentionBatch
from engine.graphs.draft_graphs import DraftGraphs
from engine.graphs.piece_graphs import PieceGraphs
from engine.graphs.spread_graphs import SpreadGraphs


class TokenGraphs:
    """The graphs of these kinds. All ranks make the same choice for a step, only by its rows."""

    def __init__(
        self, drafts: DraftGraphs | None, spreads: SpreadGraphs | None, pieces: PieceGraphs | None
    ) -> None:
        self._drafts, self._spreads, self._pieces = drafts, spreads, pieces
        self._kinds = [kind.graphs for kind in (drafts, spreads, pieces) if kind is not None]

    @property
    def num_graphs(self) -> int:
        """Number of graphs of all sizes; those in pieces count once."""
        return sum(kind.num_graphs for kind in self._kinds)

    def capture_all(self) -> None:
        """Record the graphs of all sizes (`StepGraphs.capture_all`)."""
        for kind in self._kinds:
            kind.capture_all()

    def hidden(
        self, ids: torch.Tensor, batch: AttentionBatch, prepare: Callable[[AttentionBatch], AttentionStep]
    ) -> tuple[torch.Tensor, bool] | None:
        """Return a step's hidden states, [N, H], which the next step overwrites, and whether graphs were replayed;
        None if none has its size. `prepare`: the attention backend's.
        """
        if self._drafts is not None and (size := self._drafts.size_of(batch)) is not None:
            return self._drafts.hidden(ids, batch, size)
        if self._spreads is not None and (count := self._spreads.size_of(batch)) is not None:
            return self._spreads.hidden(ids, batch, count)
        if self._pieces is not None and (count := self._pieces.size_of(len(ids))) is not None:
            return self._pieces.hidden(ids, prepare(batch), count)
        return None
