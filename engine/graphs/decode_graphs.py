"""Decode steps as CUDA graphs: the device gets a few changed words, and the step is replayed.

    words ─▶ rows ─▶ [ forward graph ] ─▶ logits ─┬▶ [ plain sampler ]      every row uses only its temperature
                                                  ├▶ [ cutting sampler ]    some row has top-k, top-p or min-p
                     masks of grammars ───────────┼▶ [ masked sampler ]     the same among allowed tokens
                                                  └▶ the sampler itself     some row needs more ────┐
             rows ◀── tokens, positions ◀─────────┴─────────────────────────────────────────────────┘

Logits have a fixed address, so that all four can read them. A row with penalties prevents recorded sampling in its
step, but never recorded layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Literal

import torch

from cache import PageCopy
from engine.attention.batch import AttentionBatch
from engine.attention.places import Places
from engine.graphs.device_rows import DeviceRows
from engine.graphs.row_assignment import RowAssigner, RowChanges, RowLayout
from engine.graphs.step_graphs import Capture, DecodeSize, DecodeSizes, StepGraphs
from engine.sampling.graph_chooser import GraphChooser, fits_forward, fits_graph, fits_masked_graph, is_cut
from engine.sampling.masks import Failures, GrammarMasks, StaticMasks
from engine.sampling.step_rows import rows_of_step
from engine.values.logprobs import TokenLogprobs
from engine.values.plan import Chunk, PagePair, StepPlan, StepResult
from engine.values.request import PENDING
from engine.values.sampling_row import SamplingRow

Decode = Callable[[torch.Tensor, AttentionBatch, torch.Tensor], None]
"""Maps int64 token ids [R] and their batch to logits, which it writes to float32 [R, V]; writes the tokens' KV."""
Sample = Callable[[torch.Tensor, Sequence[SamplingRow]], tuple[torch.Tensor, list[TokenLogprobs | None]]]
"""Maps float32 logits [R, V] and their rows to int64 tokens [R] and log-probabilities (`Sampler.sample`)."""

RecordedSampler = Literal["plain", "cutting", "masked"]


@dataclass(frozen=True, slots=True)
class GraphStep:
    """A step whose chunks have been assigned rows on the device."""

    copies: Sequence[PageCopy]
    swap_out: Sequence[PagePair]
    swap_in: Sequence[PagePair]
    changes: RowChanges
    size: DecodeSize
    """The size of the graph."""
    sampler: RecordedSampler | None
    """The graph that chooses all tokens; None if the sampler itself does."""
    tails: Sequence[int | None] | None
    """None if a graph chooses all tokens without masks. Else, for each row, the row of the previous step that
    sampled its last token, or None if that token is known."""
    chunks: Sequence[Chunk]
    """In the plan's order; empty on ranks after the first, which know no requests."""

    @property
    def rows(self) -> Sequence[int]:
        """Graph row of each chunk."""
        return self.changes.rows

    def sampling_rows(self, known: Callable[[], Sequence[int]]) -> list[SamplingRow]:
        """Return the rows for the sampler or for grammars, in the graph's order; `known` returns the previous
        step's tokens.
        """
        if not self.chunks:
            return []
        assert self.tails is not None
        pairs = sorted(zip(self.rows, self.chunks, strict=True), key=itemgetter(0))
        return rows_of_step([chunk for _, chunk in pairs], self.tails, known)

    def result(
        self,
        sampled: list[int],
        prepare: float,
        sample: float,
        logprobs: list[TokenLogprobs | None],
        *,
        is_replayed: bool,
    ) -> StepResult:
        """Return the step's result, in the plan's order; the tokens and log-probabilities are in the graph's."""
        tokens = [sampled[row] for row in self.rows]
        reports = [logprobs[row] for row in self.rows]
        return StepResult(tokens, reports, None, prepare, sample, is_replayed=is_replayed)


class DecodeGraphs:
    """The rows of decoding requests and the graphs that advance them. The thread that prepares steps calls
    `place`, the one that runs them `run`.
    """

    def __init__(
        self,
        decode: Decode,
        choose: GraphChooser,
        sample: Sample,
        layout: RowLayout,
        sizes: DecodeSizes,
        vocab_size: int,
        device: torch.device,
        capture: Capture,
        grammars: GrammarMasks | None = None,
        *,
        has_states: bool = False,
    ) -> None:
        """`sample` chooses the tokens of steps in which some row needs more than a temperature and, with
        `grammars`, a mask. `has_states`: whether the model has recurrent layers.
        """
        self._decode, self._choose, self._sample, self._layout = decode, choose, sample, layout
        self._book = RowAssigner(layout)
        self._rows = DeviceRows(layout, device, has_states=has_states)
        self._has_states = has_states
        self._logits = torch.zeros(layout.max_rows, vocab_size, dtype=torch.float32, device=device)
        self._sizes = sizes
        self._forwards = StepGraphs(sizes.all, self._forward, capture)
        self._samplers: dict[RecordedSampler, StepGraphs[int]] = {
            "plain": StepGraphs(sizes.rows, partial(self._choose_all, cuts=False), capture),
            "cutting": StepGraphs(sizes.rows, partial(self._choose_all, cuts=True), capture),
        }
        self._grammars, self._masks = grammars, None
        if grammars is not None:
            self._masks = StaticMasks(layout.max_rows, vocab_size, device)
            self._samplers["masked"] = StepGraphs(sizes.rows, self._choose_masked, capture)
        self._last = -1  # Number of the last step that the device's rows include.
        self._is_broken = False

    @property
    def num_graphs(self) -> int:
        """Number of graphs of all sizes."""
        return len(self._sizes.all) + len(self._samplers) * len(self._sizes.rows)

    def capture_all(self) -> None:
        """Record the graphs of all sizes (`StepGraphs.capture_all`)."""
        self._forwards.capture_all()
        for graphs in self._samplers.values():
            graphs.capture_all()

    def place(self, plan: StepPlan, places: Places) -> GraphStep | None:
        """Assign rows to the plan's chunks and update `places`; None when no graph can run the step.

        Graphs run steps in which every request computes one token and samples one, and its recurrent state, in
        models that have one, advances by it where it is.
        """
        chunks = plan.chunks
        if not chunks or plan.num_tokens > len(chunks):
            return None
        size = self._sizes.of(len(chunks), max(chunk.start for chunk in chunks) + 1)
        if size is None or not all(chunk.samples and fits_forward(chunk) for chunk in chunks):
            return None
        if self._has_states and (plan.states_out or plan.states_in or not all(map(_stays_in_slot, chunks))):
            return None
        if self._is_broken:
            self._book.forget()
        before, places.rows = places.rows, {}
        try:
            changes = self._book.place(chunks, before)
        except BaseException:
            self._book.forget()
            raise
        pairs = list(zip(chunks, changes.rows, strict=True))
        places.rows = {chunk.request.request_id: row for chunk, row in pairs}
        sampler = self._sampler_for(chunks)
        tails = None if sampler in ("plain", "cutting") else _tails(pairs, before)
        return GraphStep(plan.copies, plan.swap_out, plan.swap_in, changes, size, sampler, tails, chunks)

    def _sampler_for(self, chunks: Sequence[Chunk]) -> RecordedSampler | None:
        if all(fits_graph(chunk) for chunk in chunks):
            return "cutting" if any(is_cut(chunk.request.sampling) for chunk in chunks) else "plain"
        return "masked" if "masked" in self._samplers and all(map(fits_masked_graph, chunks)) else None

    def forward(self, step: GraphStep, before: torch.Tensor | None) -> bool:
        """Compute the logits of a step, and return whether a graph was replayed.

        before: tokens that the previous step sampled. Raises RuntimeError if the previous step, which this one
        follows, failed: its rows are then stale.
        """
        changes = step.changes
        with self._breaking():
            if not changes.is_reset and changes.number != self._last + 1:
                raise RuntimeError("the previous step failed, so this step's rows are out of date")
            self._rows.write(changes, before)
            return self._forwards.run(step.size)

    def sample(
        self, step: GraphStep, known: Callable[[], Sequence[int]]
    ) -> tuple[torch.Tensor, list[TokenLogprobs | None]]:
        """Choose the tokens of a step after `forward`, and advance the rows by them.

        known: returns the previous step's tokens; called only if the sampler needs them. Returns each row's
        token, int64 [rows], which later steps do not overwrite, and its log-probabilities.
        """
        count, changes = len(step.rows), step.changes
        with self._breaking():
            reports: list[TokenLogprobs | None] = [None] * count
            failed: Failures = {}
            if step.sampler is None:
                chosen, reports = self._sample(self._logits[:count], step.sampling_rows(known))
                self._rows.advance(count, chosen)
            else:
                if step.sampler == "masked":
                    failed = self._write_masks(step.sampling_rows(known))
                self._samplers[step.sampler].run(step.size.rows)
            sampled = self._rows.sampled[:count].clone()
            for row, failure in failed.items():
                sampled[row] = failure
        self._last = changes.number
        if changes.is_reset:
            self._is_broken = False
        return sampled, reports

    def _write_masks(self, rows: Sequence[SamplingRow]) -> Failures:
        """Send the masks of the rows' grammars; returns the rows whose grammar failed."""
        assert self._grammars is not None and self._masks is not None
        constrained, masks, failed = self._grammars.fill(rows)
        self._masks.write(constrained, masks)
        return failed

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Treat the rows as unknown if this fails. The other thread sees that when it prepares the next step."""
        try:
            yield
        except BaseException:
            self._is_broken = True
            raise

    @torch.inference_mode()
    def _forward(self, size: DecodeSize) -> None:
        count, batch = size.rows, self._rows.batch(*size)
        self._rows.enter(count)
        self._decode(self._rows.token_ids(count), batch, self._logits[:count])

    @torch.inference_mode()
    def _choose_all(self, count: int, *, cuts: bool) -> None:
        chosen = self._rows.choose(count, self._logits[:count], self._choose, cuts=cuts)
        self._rows.advance(count, chosen)

    @torch.inference_mode()
    def _choose_masked(self, count: int) -> None:
        assert self._masks is not None
        self._masks.apply(self._logits[:count])
        self._choose_all(count, cuts=True)


def _stays_in_slot(chunk: Chunk) -> bool:
    """Whether a step reads and writes a recurrent state in the same slot, and in no other."""
    use = chunk.state
    return use is not None and use.source == use.target and not use.num_missing and not use.borders


def _tails(pairs: Sequence[tuple[Chunk, int]], before: dict[str, int]) -> list[int | None]:
    """Return `GraphStep.tails` of chunks and their rows. If a request's last step failed, any row will do."""
    found: list[int | None] = [None] * len(pairs)
    for chunk, row in pairs:
        if chunk.token_ids[-1] == PENDING:
            found[row] = before.get(chunk.request.request_id, 0)
    return found
