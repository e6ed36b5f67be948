"""Decode steps as CUDA graphs: the device gets a few changed words, and the step is replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.batch import AttentionBatch
from engine.graphs.device_rows import DeviceRows
from engine.graphs.row_assignment import RowAssigner, RowChanges, RowLayout
from engine.graphs.step_graphs import Capture, StepGraphs
from engine.runner.prepared_step import Places
from engine.sampling.graph_chooser import GraphChooser, fits_graph
from engine.scheduling.plan import StepPlan

Decode = Callable[[torch.Tensor, AttentionBatch], torch.Tensor]
"""Maps int64 token ids [R] and their batch to float32 logits [R, V]; writes the tokens' KV."""


@dataclass(frozen=True, slots=True)
class GraphStep:
    """A step whose chunks have been assigned rows on the device."""

    plan: StepPlan
    changes: RowChanges
    size: int
    """Number of rows of the graph."""

    @property
    def rows(self) -> Sequence[int]:
        """Graph row of each chunk."""
        return self.changes.rows


class DecodeGraphs:
    """The rows of decoding requests and the graphs that advance them. The thread that prepares steps calls
    `place`, the one that runs them `run`.
    """

    def __init__(
        self,
        decode: Decode,
        choose: GraphChooser,
        layout: RowLayout,
        sizes: Sequence[int],
        max_len: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._decode, self._choose, self._layout = decode, choose, layout
        self._book = RowAssigner(layout)
        self._rows = DeviceRows(layout, max_len, device)
        self.graphs = StepGraphs(sizes, self._advance, capture)
        self._last = -1  # Number of the last step that the device's rows include.
        self._is_broken = False

    def place(self, plan: StepPlan, places: Places) -> GraphStep | None:
        """Assign rows to the plan's chunks and update `places`; None when no graph can run the step.

        Graphs run steps in which every request computes one token and samples one by its temperature alone.
        """
        chunks = plan.chunks
        size = self.graphs.size_for(len(chunks))
        if not chunks or size is None or plan.num_tokens > len(chunks):
            return None
        longest = self._layout.max_pages * self._layout.page_size
        if not all(chunk.samples and chunk.start < longest and fits_graph(chunk) for chunk in chunks):
            return None
        if self._is_broken:
            self._book.forget()
        before, places.rows = places.rows, {}
        try:
            changes = self._book.place(chunks, before)
        except BaseException:
            self._book.forget()
            raise
        pairs = zip(chunks, changes.rows, strict=True)
        places.rows = {chunk.request.request_id: row for chunk, row in pairs}
        return GraphStep(plan, changes, size)

    def run(self, step: GraphStep, before: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
        """Return each row's token, int64 [rows], valid until the next step runs, and whether a graph was replayed.

        before: tokens that the previous step sampled. Raises RuntimeError when a previous step failed that this
        one was prepared to follow: its rows are then stale.
        """
        changes = step.changes
        try:
            if not changes.is_anew and changes.number != self._last + 1:
                raise RuntimeError("the previous step failed, so this step's rows are out of date")
            self._rows.write(changes, before)
            is_replayed = self.graphs.run(step.size)
        except BaseException:
            self._is_broken = True  # The other thread sees this when it prepares the next step.
            raise
        self._last = changes.number
        if changes.is_anew:
            self._is_broken = False
        return self._rows.sampled[: len(step.rows)], is_replayed

    @torch.inference_mode()
    def _advance(self, count: int) -> None:
        logits = self._decode(self._rows.token_ids(count), self._rows.batch(count))
        self._rows.advance(count, logits, self._choose)
