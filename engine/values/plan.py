"""A step as a value: the plan that the scheduler hands to the runner, and the result that comes back.

Scheduler.schedule(now) -> StepPlan ──▶ Runner.prepare(plan) ─▶ StepResult ──▶ Scheduler.apply(...) -> deltas

A chunk is made for every token. As a struct it costs a seventh of a frozen dataclass, and the garbage collector
can ignore it because it is in no reference cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from cache import LeaseWindow, PageCopy, ScratchRows, StateStep
from engine.base.structs import Struct
from engine.values.logprobs import PackedLogprobs
from engine.values.logprobs import TokenLogprobs as TokenLogprobs
from engine.values.request import Request
from engine.values.stream_delta import StreamDelta

PagePair = tuple[int, int]
"""A device page and a host page, one of which is copied to the other."""


class StateCopy(NamedTuple):
    """A slot of recurrent states, and the host pages to or from which its content is copied."""

    slot: int
    hosts: tuple[int, ...]


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
    """The ids at positions start .. start + num_tokens; `PENDING` for the one that the previous step samples."""
    pages: Sequence[int]
    """Page table: page i holds tokens [i * page_size, (i + 1) * page_size). Covers the chunk. Read-only."""
    samples: bool
    """Whether it reaches the request's last token, so that the next is sampled from it; not if pooled."""
    num_drafts: int = 0
    """How many of its last tokens are draft tokens; the correct ones are kept."""
    state: StateStep | None = None
    """The slots of recurrent states that it reads and writes; None in a model without any."""
    window: LeaseWindow | ScratchRows | None = None
    """Pages of layers with a window, which cover the chunk and the window before it. Read-only. None where these
    layers have no pages of their own."""


@dataclass(frozen=True)
class StepPlan:
    """One step: pages are copied to the host, from the host, then to other pages; then all chunks run in one
    batch, decode rows before prefill rows."""

    chunks: tuple[Chunk, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    """Pages to copy before the chunks run; all sources are read before any target is written."""
    swap_out: tuple[PagePair, ...] = ()
    """Pages to copy to the host, before anything else is written."""
    swap_in: tuple[PagePair, ...] = ()
    """Pages to copy from the host after that, before `copies`."""
    preempted: tuple[Request, ...] = ()
    ended: tuple[StreamDelta, ...] = ()
    """Last deltas of requests that ended without a step: aborted, or resumed after their last token."""
    pooled: tuple[Chunk, ...] = ()
    """The chunks that reach the end of a pooled request's prompt."""
    states_out: tuple[StateCopy, ...] = ()
    """States to copy to the host, before anything else is written."""
    states_in: tuple[StateCopy, ...] = ()
    """States to copy from the host after that."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.chunks and not self.swap_out and not self.states_out

    @cached_property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def _only_decodes(self) -> bool:
        """Whether each chunk has one token, as in most steps; the counts below then need no loop."""
        return self.num_tokens == len(self.chunks)

    @cached_property
    def num_decodes(self) -> int:
        """Number of requests with a single token left to compute, which this step computes."""
        if self._only_decodes:
            return len(self.chunks)
        return sum([chunk.num_tokens - chunk.num_drafts == 1 for chunk in self.chunks])

    @cached_property
    def num_drafts(self) -> int:
        """Draft tokens."""
        return 0 if self._only_decodes else sum([chunk.num_drafts for chunk in self.chunks])

    @cached_property
    def num_prefill(self) -> int:
        """All other tokens."""
        return self.num_tokens - self.num_decodes - self.num_drafts

    @property
    def prefill_context(self) -> float:
        """Tokens that a prefill token attends to, on average; 0 without any."""
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
    """The result of a step: the sampled tokens of the plan's sampling chunks, in their order."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]
    """One per token; None where the request did not ask for them."""
    counts: Sequence[int] | None = None
    """How many tokens each sampling chunk got: its accepted draft tokens and one more. None: one each."""
    prepare_seconds: float = 0.0
    """The part of the step's time before the forward pass."""
    sample_seconds: float = 0.0
    """The part of the step's time after the forward pass."""
    prompt_logprobs: Mapping[str, PackedLogprobs] = field(default_factory=dict)
    """By request id: log-probabilities of the prompt tokens that the chunk's logits predict, if asked for."""
    is_replayed: bool = False
    """Whether the step was launched as a recorded graph."""
    pooled: Mapping[str, bytes] = field(default_factory=dict)
    """By request id: the values of the plan's pooled requests, in float32, little endian; empty if invalid."""


class StepUnderway(Protocol):
    """A step that was launched and may still run on its device. The next one may be launched before it ends."""

    def is_done_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for the device; returns whether it is done."""

    def wait(self) -> StepResult:
        """Wait for the step's result. Raises the error with which the step failed."""


Step = Callable[[], StepResult | StepUnderway]
"""A prepared step. Call it exactly once: it copies pages, computes the chunks' KV and samples, or launches this on
a device after the earlier steps."""


def result_of(found: StepResult | StepUnderway) -> StepResult:
    """Return the result of a step that was called, after waiting for the device if it still runs there."""
    return found if isinstance(found, StepResult) else found.wait()


class Runner(Protocol):
    """Executes steps: with a model on a device, or by a script in a test."""

    def prepare(self, plan: StepPlan) -> Step:
        """Read everything that the step needs of the scheduler's state, which changes before the step runs.

        Steps run one at a time, in any thread, in the order in which they were prepared. Those of a pipeline enter
        its first stage when they are called, without waiting, and are underway until the last has sampled.
        """


def num_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many leading draft tokens equal the tokens sampled at their positions; these are accepted."""
    pairs = enumerate(zip(drafts, sampled, strict=False))
    return next((index for index, (draft, token) in pairs if draft != token), len(drafts))
