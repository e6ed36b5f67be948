"""One replica as a fleet knows it: its last heartbeat, and what this process has sent it since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from engine.tenants.tenant_shares import MOST_TENANTS
from router.addresses import ReplicaAddress
from router.cost import Candidate

MemberState = Literal["available", "draining", "lost", "failing", "circuit_open"]
"""State of a replica as this process sees it. A replica whose queue is full counts as available."""


class ReplicaLoad(msgspec.Struct, frozen=True, array_like=True):
    """A replica's load as its last heartbeat reported it."""

    num_requests: int = 0
    """Requests of all ingresses that wait there or run there."""
    num_own: int = 0
    """The share of `num_requests` that came from this process."""
    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    """Prompt tokens, probably not cached, of the requests that wait there or run there."""
    dispatches_seen: int = 0
    """Number of the last dispatch of this process that these figures include."""
    pages_free: int = 0
    """KV pages that are free or can be evicted."""
    pages_total: int = 0
    page_size: int = 16
    """Tokens of a KV page."""
    prefill_rate: float = 0.0
    """Measured uncached prefill tokens/s; 0 until measured."""
    prefill_share: float = 0.0
    """Share of the last few seconds that it spent on prefill, 0..1."""
    decode_rate: float = 0.0
    """Measured decode tokens/s of all its requests together; 0 until measured."""
    evict_price: float = 0.0
    """Seconds of recomputation that each token inserted there is likely to cost; 0 while pages are free."""
    is_draining: bool = False
    is_full: bool = False
    """Whether its queue accepts no more requests."""
    max_running: int = 0
    """Most requests that it runs at the same time."""
    finish_rate: float = 0.0
    """Requests per second that it finished recently."""
    load_rates: tuple[float, ...] = ()
    """Tokens/s whose KV it copies to its device, by the tier below it (cache/news/tier.py): host memory first."""
    fetch_rate: float = 0.0
    """Tokens/s whose KV it fetches from another replica; 0 if it fetches none."""
    failing: str = ""
    """Why its engine computes nothing now (`EngineLoop.failing`); "" while it is healthy."""
    num_deferrable: int = 0
    """Those of `num_requests` that yield to all others, because they are of batches."""
    deferrable_prefill_tokens: int = 0
    """Those of `queued_prefill_tokens` that belong to these."""
    requests_of: dict[str, int] = {}
    """While its batch is full: how many of `num_requests` belong to each of the `MOST_TENANTS` largest tenants."""
    seconds_left: float | None = None
    """Seconds until its machine ends, where that was announced; `is_draining` is set then, too."""

    def most_requests_of(self, tenant: str) -> int:
        """Return the most requests that a tenant can have there while the batch is full. A tenant that is not
        listed has no more than those that are.
        """
        unlisted = min(self.requests_of.values()) if len(self.requests_of) >= MOST_TENANTS else 0
        return self.requests_of.get(tenant, unlisted)


@dataclass(slots=True)
class Member:
    """One replica of a fleet, which locks: it is not thread-safe by itself."""

    address: ReplicaAddress | None = None
    deployment: str = ""
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    is_lost: bool = False
    own: set[str] = field(default_factory=set)
    """Open requests of this process."""
    own_deferrable: set[str] = field(default_factory=set)
    """Those of them that yield to all others."""
    num_dispatches: int = 0
    unseen: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Dispatches of this process that no heartbeat counts yet: request id -> (number, uncached tokens)."""
    num_unseen_tokens: int = 0
    """Tokens of `unseen`."""
    num_failures: int = 0
    circuit_open_until: float = 0.0

    def drop(self, request_id: str) -> None:
        """Forget an open request of this process."""
        self.own.discard(request_id)
        self.own_deferrable.discard(request_id)
        self.see(request_id)

    def see(self, request_id: str) -> None:
        """Forget an unseen dispatch, if it is one."""
        _, tokens = self.unseen.pop(request_id, (0, 0))
        self.num_unseen_tokens -= tokens

    @property
    def is_out(self) -> bool:
        """Whether it does not answer, or its engine fails: it receives nothing, even when it looks idle."""
        return self.is_lost or bool(self.load.failing)

    @property
    def num_requests(self) -> int:
        """Number of requests there: others' as of its heartbeat, those of this process exactly."""
        return max(0, self.load.num_requests - self.load.num_own) + len(self.own)

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that fit into its KV memory."""
        return self.load.pages_total * self.load.page_size

    def state(self, now: float) -> MemberState:
        """Return its state at a clock."""
        if self.is_lost:
            return "lost"
        if self.load.failing:
            return "failing"
        if self.load.is_draining:
            return "draining"
        return "circuit_open" if now < self.circuit_open_until else "available"

    @property
    def num_idle(self) -> int:
        """Number of additional requests that it could run."""
        return max(0, (self.load.max_running or 1) - self.num_requests)

    def candidate(self, replica: str, *, is_available: bool) -> Candidate:
        """Return what placement reads of it. Requests that yield to all others are no load to them."""
        load = self.load
        num_deferrable = max(load.num_deferrable, len(self.own_deferrable))
        to_prefill = load.queued_prefill_tokens - load.deferrable_prefill_tokens
        return Candidate(
            replica=replica,
            queued_prefill_tokens=to_prefill + self.num_unseen_tokens,
            num_running=max(0, self.num_requests - num_deferrable),
            pages_free=load.pages_free,
            pages_total=load.pages_total,
            evict_price=load.evict_price,
            prefill_rate=load.prefill_rate,
            decode_tokens_per_s=load.decode_rate,
            is_available=is_available,
            page_size=load.page_size,
            max_running=load.max_running,
            finish_rate=load.finish_rate,
            load_rates=load.load_rates,
        )
