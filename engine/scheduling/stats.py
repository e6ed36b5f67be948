"""The reports of an engine: a record of each step, and a snapshot of its load."""

from __future__ import annotations

from typing import NamedTuple

from cache import CacheStats, PageAccount, StateAccount
from engine.base.structs import Struct, field
from engine.host_tier.host_pool import HostAccount, HostTraffic
from engine.host_tier.lower_tier import TierTotals
from engine.host_tier.peers import PeerTotals

PHASES = ("prefill", "decode", "mixed")
"""Contents of a step's batch: prompts, decoding requests, or both."""


class StageSeconds(NamedTuple):
    """A step's time by stage, in seconds."""

    schedule: float
    """Planning: choosing tokens and pages."""
    prepare: float = 0.0
    """Making the batch, with the copies of pages, indices and ids to the device."""
    forward: float = 0.0
    """The model's forward pass."""
    sample: float = 0.0
    """Sampling tokens from the logits."""
    output: float = 0.0
    """Applying the result."""


class StepStats(Struct, frozen=True):
    """A record of one engine step."""

    stages: StageSeconds
    num_requests: int
    num_decode_tokens: int
    """Tokens of requests that had one token left to compute: one per decoding request."""
    num_prefill_tokens: int
    """All other tokens except draft tokens."""
    num_draft_tokens: int = 0
    """Draft tokens that were verified."""
    num_accepted_tokens: int = 0
    """Draft tokens that were accepted."""
    is_replayed: bool = False
    """Whether it was replayed as a recorded graph."""

    @property
    def phase(self) -> str:
        """The contents of the batch, one of `PHASES`."""
        if self.num_prefill_tokens == 0:
            return "decode"
        return "mixed" if self.num_decode_tokens else "prefill"


class EngineLoad(Struct, frozen=True):
    """How busy an engine is, as of its last step. Counters are cumulative since the engine started."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    """Waiting requests that were deferred: a running one computes the page that they begin with."""
    waiting_prefill_tokens: int = 0
    """Tokens still to compute of waiting and running prompts, without those that were cached, or being loaded from
    files or another engine, when a waiting one arrived."""
    num_deferrable: int = 0
    """Requests of batches, running and waiting, which all others may preempt."""
    requests_of: dict[str, int] = field(default_factory=dict)
    """While requests wait or the batch is full: requests of the tenants with most, without deferrable ones."""
    deferrable_prefill_tokens: int = 0
    """Those of `waiting_prefill_tokens` that are theirs."""
    oldest_wait_seconds: float = 0.0
    pages: PageAccount = field(default_factory=lambda: PageAccount(0, 0, 0, 0))
    states: StateAccount = StateAccount(0, 0, 0, 0)
    """Slots for recurrent states; none in a model without recurrent layers."""
    page_size: int = 16
    """Tokens."""
    eviction_age: float | None = None
    """Seconds since the last use of the pages that the next allocation evicts; None while pages are free."""
    cache: CacheStats = field(default_factory=CacheStats)
    num_steps: int = 0
    num_preemptions: int = 0
    num_swapped: int = 0
    """Preemptions that copied KV to host memory."""
    host_pages: HostAccount = field(default_factory=HostAccount)
    host_traffic: HostTraffic = field(default_factory=HostTraffic)
    num_host_evicted: int = 0
    """Pages of prefixes that host memory evicted."""
    lower_tier: TierTotals = TierTotals()
    """Contents of the files below host memory, and the pages moved to and from them."""
    peers: PeerTotals = PeerTotals()
    """Pages fetched from other engines."""
    num_finished: int = 0
    prefill_rate: float = 0.0
    """Uncached prompt tokens per second of engine time while prefilling, a moving average; 0 until measured."""
    decode_seconds: float = 0.0
    """Seconds of a step that only decodes, a moving average; 0 until measured."""
