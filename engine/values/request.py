"""A request as the scheduler sees it: its tokens, and how many of them have their KV computed."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from cache import Lease, Namespace
from engine.values.beam_search import BeamSearch
from engine.values.pooling import Pooling
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import Timings

if TYPE_CHECKING:
    from engine.grammar.constraint import Constraint

PENDING = -1
"""Placeholder for a token that a step in flight samples. After a pooled prompt it stands for the result."""


class Status(enum.Enum):
    """State of a request. Preemption leads from RUNNING back to WAITING; nothing leads out of FINISHED."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class KVSource(NamedTuple):
    """An engine from which the KV of a request's beginning can be fetched."""

    peer: Hashable
    """The engine that has it, named as the page mover names it."""
    num_tokens: int
    """Leading tokens whose KV it reportedly holds."""


class QueuePosition(NamedTuple):
    """A request's position in the order of its engine, fixed on arrival. The smallest goes first and is preempted
    last.
    """

    is_deferrable: bool
    """Whether it comes after all that are not."""
    effective_arrival: float
    """Seconds on the engine's clock at which a request of priority 0 would have this position."""
    arrival: float
    """Seconds on the engine's clock."""
    queue: str
    """A tenant's name, or "" for the only queue. Queues take turns."""
    preemption_level: int
    """Which requests it may preempt: see `can_preempt`."""

    def can_preempt(self, running: QueuePosition) -> bool:
        """Whether a waiting request at this position may preempt a running one at the other.

        A request that is not deferrable may preempt one that is. Equals never preempt each other, so a preempted
        request does not preempt one that was admitted since.
        """
        if self.is_deferrable != running.is_deferrable:
            return running.is_deferrable
        return self.queue == running.queue and self.preemption_level > running.preemption_level and self < running


_NOT_QUEUED = QueuePosition(False, 0.0, 0.0, "", 0)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """A request inside one engine. Only the scheduler changes it once it is added.

    There are no prefill and decode phases: the scheduler gives a request tokens until `num_computed` reaches
    `num_tokens`. A chunked prompt, a prefix hit, recompute after preemption and a stream resumed from
    another replica (`output_ids` not empty on arrival) all follow this rule.

    While a step is in flight, the scheduler plans the next one:

    tokens:  [ computed | in flight | to compute | PENDING: the token being sampled ]
               0 .. num_computed .. num_planned  .. num_tokens
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    arrival: float
    """Seconds on the engine's clock."""
    seed: int
    """Seed of the sampler's noise: `sampling.seed`, or a random one if that is None."""
    namespace: Namespace
    """Root of its prefix-cache key: prefixes are shared only within a namespace."""
    priority: int = 0
    """Lower goes first and is preempted last, as in vLLM."""
    tenant: str = ""
    """Name of the tenant that sent it."""
    is_deferrable: bool = False
    """Whether every request that is not may preempt it, as with the requests of a batch."""
    constraint: Constraint | None = None
    """Its state in `sampling.grammar`; only the sampler uses it."""
    needs_previous_result: bool = False
    """Whether its next step depends on which tokens, or how many, its previous step samples."""
    num_resumed: int = 0
    """Number of output ids that it arrived with: generated elsewhere before this engine took over."""
    num_prompt_reported: int = 0
    """Leading prompt tokens whose log-probabilities were reported, here or elsewhere, if the request wants
    them."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and output ids in one list; `PENDING` instead of those that are being sampled."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it, including the model's own."""
    longest: int = 0
    """Most tokens, including the prompt, at which it always ends."""
    num_computed: int = 0
    """Leading tokens whose KV is in `lease.pages`."""
    num_planned: int = 0
    """Leading tokens whose KV is there once the steps in flight are done; without any, `num_computed`."""
    queue_position: QueuePosition = _NOT_QUEUED
    """Its position among the requests of its engine."""
    status: Status = Status.WAITING
    state_borders: list[int] = field(default_factory=list)
    """Positions, ascending, at which its recurrent state will be kept
    (`engine.scheduling.extensions.recurrent`)."""
    lease: Lease | None = None
    """Its hold on KV pages while running."""
    num_cached: int | None = None
    """Prompt tokens found in the cache at first admission; None before it."""
    num_expected_cached: int = 0
    """Tokens that were cached, or being loaded, when it last began to wait; admission will probably find them."""
    num_preemptions: int = 0
    num_recomputed: int = 0
    """Tokens computed a second time: after a preemption, or here after another engine had computed them."""
    kv_pages_peak: int = 0
    """Most KV pages of a lease that it has given up, or of all its beams together."""
    num_preemptions_reported: int = -1
    """Its preemptions when its timings were last reported; -1 before the first time."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    search: BeamSearch | None = None
    """The search of a request that searches beams, and of its beams."""
    beams: list[Request] = field(default_factory=list)
    """Its beams, each with a lease of its own; the request then has none
    (`engine.scheduling.extensions.beam_group`)."""
    num_beams: int = 0
    """Number of beams that it has had so far."""
    leader: Request | None = None
    """The request that a beam belongs to; None for a request."""
    pooling: Pooling | None = None
    """The result wanted of its prompt, with which it ends: `sampling.pooling`."""
    source: KVSource | None = None
    """Another engine with KV of its beginning."""
    last_turn: int = 0
    """The number of its last turn to decode in a pipeline, counted over all requests."""

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
        is_deferrable: bool = False,
        num_prompt_reported: int = 0,
        source: KVSource | None = None,
    ) -> Request:
        """Make a request as it arrives. Another engine may already have generated `output_ids` and reported the
        log-probabilities of `num_prompt_reported` prompt tokens. `source` may have KV of its beginning.
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
            is_deferrable,
            num_resumed=len(output_ids),
            num_prompt_reported=num_prompt_reported,
            tokens=[*prompt_ids, *output_ids],
            pooling=sampling.pooling,
            source=source,
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
        """Tokens generated so far, including those generated elsewhere."""
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """The generated ids so far (a copy)."""
        return self.tokens[len(self.prompt_ids) :]

    @property
    def num_to_compute(self) -> int:
        """Tokens that are in no step yet: 1 while decoding, more during prefill."""
        return len(self.tokens) - self.num_planned

    @property
    def width(self) -> int:
        """Rows that it takes in a batch."""
        return 1 if self.search is None else self.search.params.width

    @property
    def reusable(self) -> Sequence[int]:
        """Leading tokens that may come from a cache, plus one: the last of these is always computed.

        A prompt whose log-probabilities are wanted needs the logits at each token whose successor was not
        reported.
        """
        if self.sampling.prompt_logprobs is None or self.num_prompt_reported >= self.num_prompt:
            return self.tokens
        return self.tokens[: max(self.num_prompt_reported, 1)]

    @property
    def looked_up(self) -> Sequence[int]:
        """The same tokens for a look-up in the cache: until one is generated, the prompt's array as the wire
        brought it, which the cache compares with its own without conversion.
        """
        tokens = self.reusable
        return self.prompt_ids if tokens is self.tokens and len(tokens) == len(self.prompt_ids) else tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether it has more tokens to compute than the one that the previous step sampled."""
        return len(self.tokens) - self.num_computed - (self.tokens[-1] == PENDING) > 1

    def timings(self, now: float) -> Timings | None:
        """Its times by phase until `now`; None before its first admission."""
        if self.admitted_at is None:
            return None
        first = now if self.first_token_at is None else self.first_token_at
        num_held = 0 if self.lease is None else len(self.lease.pages)
        return Timings(
            queue=self.admitted_at - self.arrival,
            prefill=first - self.admitted_at,
            decode=now - first,
            num_preemptions=self.num_preemptions,
            num_recomputed=self.num_recomputed,
            kv_pages_peak=max(self.kv_pages_peak, num_held),
        )
