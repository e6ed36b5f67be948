"""A rank's runner in a pipeline: it computes its stage's layers, and on the first stage also samples.

first    begin: copies, embedding, layers ─▶ send hidden states         finish: receive, head, sampling
middle   begin: copies, receive, layers ─▶ send hidden states
last     begin: copies, receive, layers ─▶ send those of the tokens that the first stage needs
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.batch import AttentionBatch
from engine.attention.pinned import on_device, on_host
from engine.graphs.draft_graphs import DraftSize, stage_sizes
from engine.graphs.step_graphs import CutCapture
from engine.graphs.token_graphs import TokenGraphs
from engine.models.native_decoder import NativeDecoder
from engine.parallel.links import StageLink
from engine.runner.model_runner import ModelRunner
from engine.runner.prepared_step import PreparedStep
from engine.runner.stage_clock import StageClock
from engine.values.plan import StepPlan, StepResult


class Begun(NamedTuple):
    """A step whose hidden states are on their way through the other stages."""

    step: PreparedStep
    stages: StageClock
    is_replayed: bool


class StageRunner(ModelRunner):
    """`run` passes one step through all stages, if all ranks call it; `begin` and `finish` are its two parts."""

    _arrived: torch.Tensor | None = None
    """Hidden states from the stage before, at an address that graphs know."""

    @property
    def is_first(self) -> bool:
        """Whether this is a rank of the first stage."""
        return self._ranks.stage.is_first

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return self._ranks.stage.count

    @property
    def stage_size(self) -> int:
        """Ranks of each stage."""
        return self._ranks.shard.size

    def begin(self, step: PreparedStep) -> Begun:
        """Compute this stage's layers and send the hidden states to the next stage."""
        assert not len(step.pending), "a token that a step in flight samples is not known to later stages"
        with torch.inference_mode():
            stages = StageClock(self.device)
            self._copy_pages(step)
            is_replayed = False
            if step.batch is not None:
                stages.begin_forward()
                hidden, is_replayed = self._hidden(step.ids, step.batch)
                if self._ranks.stage.is_last:
                    hidden = hidden.index_select(0, on_device(needed(step), self.device))
                elif isinstance(self.decoder, NativeDecoder) or self._others is not None:
                    hidden = hidden.clone()  # because the next step overwrites it
                _link(self._ranks.after).send(hidden)
            self._copied(step)()
        return Begun(step, stages, is_replayed)

    def finish(self, begun: Begun, received: torch.Tensor | None = None) -> StepResult:
        """Return the result of a step that has passed all stages; on later stages, an empty one.

        `received`: the hidden states that the last stage sent, if another thread has received them.
        """
        step, stages, is_replayed = begun
        if step.batch is None or not self.is_first:
            return StepResult((), ())
        with torch.inference_mode():
            rows = needed(step)
            if received is None:
                received = self.receive(len(rows))
            hidden = received
            if len(rows) < len(step.ids):
                hidden = received.new_empty(len(step.ids), received.shape[1])
                hidden.index_copy_(0, on_device(rows, self.device), received)
            return self._sample(step, hidden, None, stages, is_replayed=is_replayed).wait()

    def measure(self, plan: StepPlan, rounds: int) -> tuple[float, float]:
        """Return the seconds that this stage's layers, and on the first stage its output head, take for a step:
        the shortest of some rounds.
        """
        step = self.read(plan, self.device)
        assert step.batch is not None
        given = None if self.is_first else self._empty(len(step.ids)).zero_()
        layers, heads = list[float](), list[float]()
        with torch.inference_mode():
            for _ in range(rounds):
                hidden, seconds = self._timed(self.decoder, step.ids, self._prepare(step.batch), self.pages, given)
                layers.append(seconds)
                if self.is_first:
                    heads.append(self._timed(self.decoder.logits, hidden)[1])
        return min(layers), min(heads, default=0.0)

    def _timed(self, compute: Callable[..., torch.Tensor], *given: object) -> tuple[torch.Tensor, float]:
        """Return the result of a call, and its seconds on the device."""
        began, clock = time.perf_counter(), StageClock(self.device)
        found = compute(*given)
        clock.wait()
        return found, time.perf_counter() - began

    def receive(self, num_rows: int) -> torch.Tensor:
        """Wait for the next hidden states from the stage before: [num_rows, hidden_size]."""
        return _link(self._ranks.before).receive(self._empty(num_rows))

    def _empty(self, num_rows: int) -> torch.Tensor:
        """Return memory for hidden states."""
        dtype = torch.float32 if isinstance(self.decoder, NativeDecoder) else self.decoder.embed.weight.dtype
        return torch.empty(num_rows, self.model_config.hidden_size, dtype=dtype, device=self.device)

    def compute(self, step: PreparedStep) -> StepResult:
        """Pass a step through all stages, and wait for its result."""
        return self.finish(self.begin(step))

    def add_token_graphs(
        self, max_running: int, max_tokens: int, widths: Sequence[int], capture: CutCapture
    ) -> TokenGraphs:
        """Make graphs that replay the stage's layers, between the links, for steps of decodes and of drafts."""
        sizes = self._sizes_of_rows(widths, max_running)
        if not self.is_first and sizes:
            self._arrived = self._empty(max(size.num_tokens for size in sizes)).zero_()
        return super().add_token_graphs(max_running, max_tokens, widths, capture)

    def _sizes_of_rows(self, widths: Sequence[int], max_running: int) -> list[DraftSize]:
        return stage_sizes(self._recorded(widths), max_running) if self.attention.is_capturable else []

    def _hidden(self, token_ids: torch.Tensor, batch: AttentionBatch) -> tuple[torch.Tensor, bool]:
        if self.is_first:
            return super()._hidden(token_ids, batch)
        received = self.receive(len(token_ids))
        if self._arrived is not None and len(received) <= len(self._arrived):
            self._arrived[: len(received)] = received
            if (found := super()._replayed(token_ids, batch)) is not None:
                return found
        return self._layers(token_ids, batch, received), False

    def _layers(
        self, token_ids: torch.Tensor, batch: AttentionBatch, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        if received is None and self._arrived is not None:
            received = self._arrived[: len(token_ids)]
        hidden: torch.Tensor = self.decoder(token_ids, self._prepare(batch), self.pages, received)
        return hidden


def needed(step: PreparedStep) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the rows of a step's hidden states that its result depends on, ascending; the last one if none does,
    so that something comes back when all stages have run the step.
    """
    scored = [np.arange(span.row, span.row + len(span.targets)) for span in step.wanted]
    pooled = np.array([row.row for row in step.pooled], dtype=np.int64)
    rows = np.unique(np.concatenate([on_host(step.sampled_positions).numpy(), pooled, *scored]))
    return rows if len(rows) else np.array([len(step.ids) - 1])


def _link(link: StageLink | None) -> StageLink:
    assert link is not None, "a pipeline has several stages"
    return link
