"""One request as the scheduler sees it: its tokens, and how many of them have their KV computed."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from cache import Lease, Namespace
from engine.beam_search import BeamSearch
from engine.sampling_params import SamplingParams
from engine.stream_delta import Timings

if TYPE_CHECKING:
    from engine.grammar.constraint import Constraint

PENDING = -1
"""In place of a token that a step in flight samples: only the device knows it yet."""


class Status(enum.Enum):
    """Where a request is. Preemption leads from RUNNING back to WAITING; nothing leads out of FINISHED."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class QueuePosition(NamedTuple):
    """Where a request stands, for as long as it lives. The smallest goes first and is preempted last."""

    effective_arrival: float
    """Seconds on the engine's clock: when a request of priority 0 would have come to stand here."""
    arrival: float
    """Seconds on the engine's clock."""
    queue: str
    """Queues take turns with each other: a tenant's name, or "" for the only queue."""
    preemption_level: int
    """Whom it may push out: see `can_preempt`."""

    def can_preempt(self, running: QueuePosition) -> bool:
        """Whether who waits here may take the pages and the place in the batch of who runs there.

        Never among equals: a request that was preempted does not preempt in its turn whoever was let in since.
        """
        return self.queue == running.queue and self.preemption_level > running.preemption_level and self < running


_NOT_QUEUED = QueuePosition(0.0, 0.0, "", 0)


@dataclass(slots=True, eq=False)
class Request:
    """A request inside one engine. Only the scheduler changes it after it was added.

    There are no prefill and decode phases: scheduling gives a request tokens until `num_computed` reaches
    `num_tokens`. A chunked prompt, a prefix hit, recompute after preemption and a stream resumed from
    another replica (`output_ids` not empty on arrival) are all that one rule.

    While a step is in flight, the scheduler plans on:

    tokens:  [ computed | in flight | to compute | PENDING: what the step in flight samples ]
               0 .. num_computed .. num_planned  .. num_tokens
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    arrival: float
    """Seconds on the engine's clock."""
    seed: int
    """What the sampler's noise is drawn from: `sampling.seed`, or drawn by whoever made this request."""
    namespace: Namespace
    """Root of its prefix-cache key: prefixes are shared within a namespace only."""
    priority: int = 0
    """Higher goes first and is preempted last."""
    tenant: str = ""
    """Who asks."""
    constraint: Constraint | None = None
    """Its way through `sampling.grammar`; only the sampler looks at it."""
    needs_previous_result: bool = False
    """Whether its next step depends on more than that its last one samples a token: on which, or how many."""
    num_resumed: int = 0
    """How many output ids it arrived with: tokens generated elsewhere before this engine took over."""
    num_prompt_reported: int = 0
    """Leading prompt tokens whose log-probabilities were reported, here or elsewhere, if they are asked for."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and output ids in one list; `PENDING` in place of those that are being sampled."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it, the model's own included."""
    longest: int = 0
    """Tokens, prompt included, at which it ends whatever they are."""
    num_computed: int = 0
    """Leading tokens whose KV lies in `lease.pages`."""
    num_planned: int = 0
    """Leading tokens whose KV does, once the steps in flight are done; without any, `num_computed`."""
    queue_position: QueuePosition = _NOT_QUEUED
    """Where it stands among the requests of its engine."""
    status: Status = Status.WAITING
    lease: Lease | None = None
    """Its hold on KV pages while running."""
    num_cached: int | None = None
    """Prompt tokens found in the cache at first admission; None before it."""
    num_expected_cached: int = 0
    """Tokens that were cached when it last began to wait: what its admission will probably find."""
    num_preemptions: int = 0
    num_recomputed: int = 0
    """Tokens computed a second time: after a preemption, or here after another engine had computed them."""
    num_preemptions_reported: int = -1
    """Its preemptions when its timings were last told; -1 before the first time."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    search: BeamSearch | None = None
    """Of a request that searches beams, and of its beams."""
    beams: list[Request] = field(default_factory=list)
    """Its beams, each with a lease of its own: then it holds none itself. See `engine.scheduling.beam_group`."""
    num_beams: int = 0
    """How many it has had."""
    leader: Request | None = None
    """Of a beam: the request it belongs to."""

    @classmethod
    def make(
        cls,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        arrival: float,
        seed: int,
        namespace: Namespace,
        output_ids: Sequence[int] = (),
        priority: int = 0,
        tenant: str = "",
        num_prompt_reported: int = 0,
    ) -> Request:
        """A request as it arrives; `output_ids` holds what another engine already generated for it, and the
        log-probabilities of `num_prompt_reported` prompt tokens were reported by it.
        """
        return cls(
            request_id,
            prompt_ids,
            sampling,
            arrival,
            seed,
            namespace,
            priority,
            tenant,
            num_resumed=len(output_ids),
            num_prompt_reported=num_prompt_reported,
            tokens=[*prompt_ids, *output_ids],
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.tokens)

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.prompt_ids)

    @property
    def num_output(self) -> int:
        """Tokens generated so far, those generated elsewhere included."""
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """The generated ids so far (a copy)."""
        return self.tokens[len(self.prompt_ids) :]

    @property
    def num_to_compute(self) -> int:
        """Tokens that no step was given yet: 1 while decoding, more while a prompt is being worked through."""
        return len(self.tokens) - self.num_planned

    @property
    def width(self) -> int:
        """Places that it takes in a batch."""
        return 1 if self.search is None else self.search.params.width

    @property
    def reusable(self) -> Sequence[int]:
        """Leading tokens, of which a cache may give all but the last.

        A prompt that is being scored needs the logits at each token whose successor was not reported.
        """
        if self.sampling.prompt_logprobs is None or self.num_prompt_reported >= self.num_prompt:
            return self.tokens
        return self.tokens[: max(self.num_prompt_reported, 1)]

    @property
    def is_prefilling(self) -> bool:
        """Whether it computes tokens that it has had for longer than since the step before."""
        return len(self.tokens) - self.num_computed - (self.tokens[-1] == PENDING) > 1

    def timings(self, now: float) -> Timings | None:
        """Where its time went until `now`; None before its first admission."""
        if self.admitted_at is None:
            return None
        first = now if self.first_token_at is None else self.first_token_at
        return Timings(
            queue=self.admitted_at - self.arrival,
            prefill=first - self.admitted_at,
            decode=now - first,
            num_preemptions=self.num_preemptions,
            num_recomputed=self.num_recomputed,
        )
