"""A step prepared for the device, with all that it needs of the scheduler's state except tokens still in flight.

ids:    [ 17 | PENDING | 4 5 6 ]         PENDING: sampled by a row of the previous step; the token stays on the
device rows:     0      1           2           for which tokens are sampled

Pending draft tokens come from the drafts that were computed behind the previous step (`next_drafts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch

from cache import PageCopy
from engine.attention.batch import AttentionBatch, Ints
from engine.attention.places import Places
from engine.runner.next_drafts import DraftsUnderway, NextDrafts
from engine.sampling.pooled import PooledRow, rows_to_pool
from engine.sampling.prompt_logprobs import PromptSpan, spans_to_score
from engine.sampling.step_rows import rows_of_step
from engine.values.logprobs import PackedLogprobs, TokenLogprobs
from engine.values.plan import Chunk, PagePair, StateCopy, StepPlan, StepResult, num_accepted
from engine.values.request import PENDING
from engine.values.sampling_row import SamplingRow

_NONE = np.array([], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """One step. Its tensors are on the host, or all on the device (`to_device`)."""

    copies: Sequence[PageCopy]
    swap_out: Sequence[PagePair]
    swap_in: Sequence[PagePair]
    batch: AttentionBatch | None
    """None for a step without tokens."""
    ids: torch.Tensor
    """int64 [N]: the tokens; 0 for those that are pending."""
    pending: torch.Tensor
    """int64: indices of the pending tokens."""
    sources: torch.Tensor
    """int64: the rows of the previous step that sampled the pending tokens."""
    sampled_positions: torch.Tensor
    """int64 [R]: indices of the tokens after which one is sampled."""
    chunks: Sequence[Chunk]
    """The chunks that sample. Fields that may change meanwhile are not read from their requests."""
    tails: Sequence[int | None]
    """For each of them, the row of the previous step that sampled its last token; None if that is known."""
    has_drafts: bool
    """Whether some of the tokens are draft tokens."""
    wanted: Sequence[PromptSpan]
    """Prompt tokens to score."""
    pooled: Sequence[PooledRow] = ()
    """Tokens of pooled requests, from which no next token is sampled."""
    states_out: Sequence[StateCopy] = ()
    states_in: Sequence[StateCopy] = ()
    computed: Sequence[Chunk] = ()
    """All chunks, in the order of their tokens."""
    drafts: PendingDrafts | None = None
    """Its pending draft tokens, if it has any."""
    next_drafts: NextDrafts | None = None
    """The drafts to compute behind it."""

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        places: Places,
        behind_last: NextDrafts | None = None,
        next_drafts: NextDrafts | None = None,
    ) -> PreparedStep:
        """Read a plan, and update `places` for the plan after it. The tensors are on the host. `behind_last`: the
        drafts behind the previous step, of which the plan's may be some; `next_drafts`: those to compute behind
        this one.
        """
        chunks, sampling = plan.chunks, plan.sampling_chunks
        before, places.rows = places.rows, {}  # If this fails, no row has the pending tokens of the next plan.
        ids = np.fromiter(chain.from_iterable([chunk.token_ids for chunk in chunks]), dtype=np.int64)
        ends = accumulate([chunk.num_tokens for chunk in chunks])
        waiting = [
            (chunk, end - 1)
            for chunk, end in zip(chunks, ends, strict=True)
            if chunk.token_ids[-1] == PENDING and not chunk.num_drafts
        ]
        sources = [_source(chunk, before) for chunk, _ in waiting]
        pending = np.array([at for _, at in waiting], dtype=np.int64) if waiting else _NONE
        if waiting:
            ids[pending] = 0
        tails: Sequence[int | None] = sources  # a chunk whose last token is pending samples
        if len(waiting) < len(sampling):
            tails = [_source(chunk, before) for chunk in sampling] if waiting else [None] * len(sampling)

        drafts = None
        if behind_last is not None and plan.num_drafts:
            drafts = PendingDrafts.of(chunks, behind_last.underway)
        if drafts is not None:
            ids[drafts.places] = 0

        batch = None
        if chunks:
            batch = AttentionBatch.from_chunks(
                chunks, places.page_size, places.null_page, places.null_slot, places.num_groups
            )
        prepared = cls(
            plan.copies,
            plan.swap_out,
            plan.swap_in,
            batch,
            torch.from_numpy(ids),
            torch.from_numpy(pending),
            torch.from_numpy(np.array(sources, dtype=np.int64) if waiting else _NONE),
            torch.from_numpy(_sampled_positions(plan)),
            sampling,
            tails,
            plan.num_drafts > 0,
            spans_to_score(chunks),
            rows_to_pool(plan),
            plan.states_out,
            plan.states_in,
            chunks,
            drafts,
            next_drafts,
        )
        places.rows = _first_rows(sampling)
        return prepared

    @property
    def num_rows(self) -> int:
        """Number of tokens that are sampled."""
        return self.sampled_positions.shape[0]

    def token_ids(self, sampled: torch.Tensor | None) -> torch.Tensor:
        """Return int64 [N] tokens with those that the previous step sampled (int64 [rows]), and the drafts behind
        it, filled in.
        """
        if sampled is not None and self.pending.shape[0]:
            # A request without a valid token has ended; its row is computed with any token.
            self.ids.index_copy_(0, self.pending, sampled.index_select(0, self.sources).clamp_(min=0))
        if self.drafts is not None:
            self.ids.index_copy_(0, self.drafts.places, self.drafts.tokens)
        return self.ids

    def sampling(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return those of the hidden states, [N, H], after which a token is sampled: in most steps all."""
        if self.num_rows == hidden.shape[0]:
            return hidden
        return hidden.index_select(0, self.sampled_positions)

    def rows(self, known: Callable[[], Sequence[int]]) -> list[SamplingRow]:
        """Return the rows for which tokens are sampled; `known` returns the previous step's tokens."""
        return rows_of_step(self.chunks, self.tails, known)

    def result(
        self,
        sampled: list[int],
        prepare: float,
        sample: float,
        logprobs: list[TokenLogprobs | None],
        scores: Mapping[str, PackedLogprobs],
        pooled: Mapping[str, bytes],
        *,
        is_replayed: bool,
    ) -> StepResult:
        """Return the step's result: for a chunk with draft tokens, its tokens up to the first that differs."""
        if not self.has_drafts:
            return StepResult(sampled, logprobs, None, prepare, sample, scores, is_replayed, pooled)
        kept: list[int] = []
        counts, row = [], 0
        for chunk in self.chunks:
            drafts = chunk.token_ids[chunk.num_tokens - chunk.num_drafts :]
            if self.drafts is not None:
                drafts = self.drafts.known(chunk.request.request_id, drafts)
            counts.append(num_accepted(drafts, sampled[row : row + chunk.num_drafts]) + 1)
            kept += range(row, row + counts[-1])
            row += chunk.num_drafts + 1
        kept_logprobs = [logprobs[i] for i in kept]
        tokens = [sampled[i] for i in kept]
        return StepResult(tokens, kept_logprobs, counts, prepare, sample, scores, is_replayed, pooled)


@dataclass(frozen=True, slots=True)
class PendingDrafts:
    """The draft tokens of a step that were computed behind the previous one."""

    underway: DraftsUnderway
    """They and others."""
    places: torch.Tensor
    """int64 [D]: their indices in the step."""
    sources: torch.Tensor
    """int64 [D]: where they are among those under way."""

    @classmethod
    def of(cls, chunks: Sequence[Chunk], underway: DraftsUnderway) -> PendingDrafts | None:
        """Find them in the chunks of a step; None if there are none. The tensors are on the host."""
        places, sources, end = list[int](), list[int](), 0
        for chunk in chunks:
            end += chunk.num_tokens
            if chunk.num_drafts and chunk.token_ids[-1] == PENDING:
                places += range(end - chunk.num_drafts, end)
                sources += underway.places(chunk.request.request_id, chunk.num_drafts)
        return cls(underway, torch.tensor(places), torch.tensor(sources)) if places else None

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens, int64 [D], which are on the device since the previous step was launched."""
        assert self.underway.tokens is not None
        return self.underway.tokens.index_select(0, self.sources)

    def known(self, request_id: str, drafts: Sequence[int]) -> Sequence[int]:
        """Return a request's draft tokens, after waiting for them if they are pending."""
        is_pending = len(drafts) > 0 and drafts[-1] == PENDING
        return self.underway.read(request_id, len(drafts)) if is_pending else drafts


def _source(chunk: Chunk, before: dict[str, int]) -> int | None:
    """Return the row of the previous step that sampled the chunk's last token; None if the token is known, as
    before all draft tokens.

    A request whose step failed has ended, so any row will do.
    """
    is_pending = chunk.token_ids[-1] == PENDING and not chunk.num_drafts
    return before.get(chunk.request.request_id, 0) if is_pending else None


def _first_rows(sampling: Sequence[Chunk]) -> dict[str, int]:
    """Return the first row of each request."""
    rows, row = {}, 0
    for chunk in sampling:
        rows[chunk.request.request_id] = row
        row += 1 + chunk.num_drafts
    return rows


def _sampled_positions(plan: StepPlan) -> Ints:
    """Return int64 [R]: the index in the step of each token after which one is sampled."""
    chunks = plan.chunks
    if len(plan.sampling_chunks) == plan.num_tokens:
        return np.arange(plan.num_tokens)
    ends = accumulate([chunk.num_tokens for chunk in chunks])
    if not plan.num_drafts:
        last = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples]
        return np.array(last, dtype=np.int64)
    runs = [
        np.arange(end - 1 - chunk.num_drafts, end)
        for chunk, end in zip(chunks, ends, strict=True)
        if chunk.samples
    ]
    return np.concatenate(runs)
