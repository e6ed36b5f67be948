"""A step as a value: what the scheduler asks of the runner, what the runner answers.

Scheduler.schedule(now) -> StepPlan ──▶ Runner.prepare(plan) ─▶ StepResult ──▶ Scheduler.apply(...) -> deltas

Chunks are made for every token: as structs they cost a seventh of what frozen dataclasses do, and as nothing
refers back to them, the garbage collector need not look at them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from cache import PageCopy
from engine.logprobs import PackedLogprobs
from engine.logprobs import TokenLogprobs as TokenLogprobs
from engine.request import Request
from engine.scheduling.swap import PagePair
from engine.stream_delta import StreamDelta
from engine.structs import Struct

GRAMMAR_FAILED = -2
"""In place of a token: the request's grammar cannot be followed any further."""


class Chunk(Struct, frozen=True, gc=False):
    """The tokens of one request in one step.

    request.tokens:  [ computed already | this chunk | later ]
                       0 .. start         start .. start + num_tokens
    """

    request: Request
    start: int
    """Position of the chunk's first token; tokens before it have their KV in `pages`."""
    num_tokens: int
    token_ids: Sequence[int]
    """The ids at positions start .. start + num_tokens. `PENDING` is what the step before samples for it."""
    pages: Sequence[int]
    """Page table: page i holds tokens [i * page_size, (i + 1) * page_size). Covers the chunk. Read-only."""
    samples: bool
    """Whether the chunk reaches the request's last token, so that the next token is sampled from it."""
    num_drafts: int = 0
    """Of its tokens, the last so many are guesses: those that prove right are kept."""


@dataclass(frozen=True)
class StepPlan:
    """One step: pages go to the host, from the host, then to other pages; then all chunks run in one batch, decode
    rows before prefill rows."""

    chunks: tuple[Chunk, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    """Pages to copy before the chunks run; sources are read before any destination is written."""
    swap_out: tuple[PagePair, ...] = ()
    """Pages to copy to the host, before anything else is written."""
    swap_in: tuple[PagePair, ...] = ()
    """Pages to copy from the host after that, before `copies`."""
    preempted: tuple[Request, ...] = ()
    ended: tuple[StreamDelta, ...] = ()
    """Last events of requests that ended without a step: aborted meanwhile, or resumed when they had ended."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.chunks and not self.swap_out

    @cached_property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def _only_decodes(self) -> bool:
        """Whether each chunk has one token, as in most steps: the rest is then known without a look at them."""
        return self.num_tokens == len(self.chunks)

    @cached_property
    def num_decodes(self) -> int:
        """How many of them are the one token that a request had left to compute."""
        if self._only_decodes:
            return len(self.chunks)
        return sum([chunk.num_tokens - chunk.num_drafts == 1 for chunk in self.chunks])

    @cached_property
    def num_drafts(self) -> int:
        """How many of them are guesses."""
        return 0 if self._only_decodes else sum([chunk.num_drafts for chunk in self.chunks])

    @property
    def num_prefill(self) -> int:
        """All other tokens."""
        return self.num_tokens - self.num_decodes - self.num_drafts

    @property
    def prefill_context(self) -> float:
        """Tokens that each of those attends to, on average; 0 without any."""
        if self._only_decodes:
            return 0.0
        fills = [(c.start, c.num_tokens) for c in self.chunks if c.num_tokens - c.num_drafts > 1]
        return sum([size * (start + size / 2) for start, size in fills]) / max(1, sum([size for _, size in fills]))

    @cached_property
    def sampling_chunks(self) -> list[Chunk]:
        """The chunks that tokens are sampled for, in order: the order of `StepResult.token_ids`."""
        return [chunk for chunk in self.chunks if chunk.samples]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced: the sampled tokens of the plan's sampling chunks, in their order."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]
    """One per token; None where the request did not ask for them."""
    counts: Sequence[int] | None = None
    """How many tokens each sampling chunk got: the drafts that proved right and one more. None: one each."""
    prepare_seconds: float = 0.0
    """Of the step's time: until the forward pass began."""
    sample_seconds: float = 0.0
    """Of the step's time: after the forward pass. What neither says is the forward pass."""
    prompt_logprobs: Mapping[str, PackedLogprobs] = field(default_factory=dict)
    """By request id: of the prompt tokens that the logits of its chunk predict, where asked for."""
    is_replayed: bool = False
    """Whether the step was launched as a recorded graph."""


Step = Callable[[], StepResult]
"""A prepared step: called once, it copies pages, computes the chunks' KV and samples."""


class Runner(Protocol):
    """Executes steps: the model on a device, or a script in a test."""

    def prepare(self, plan: StepPlan) -> Step:
        """Read all that the step needs of the scheduler's state, which changes before the step runs.

        Steps run in the order in which they were prepared, in whatever thread, one at a time.
        """
        ...


def num_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many leading drafts are what was sampled at their positions: that many, and one token more, stand."""
    pairs = enumerate(zip(drafts, sampled, strict=False))
    return next((index for index, (draft, token) in pairs if draft != token), len(drafts))
