"""What an engine says of itself: one record per step, and a snapshot anyone may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cache import CacheStats, PageAccount
from engine.scheduling.swap import HostAccount


class StageSeconds(NamedTuple):
    """Where a step's time went, in seconds."""

    schedule: float
    """Choosing its tokens and their pages."""
    prepare: float = 0.0
    """Making the batch: copying pages, indices and ids to the device."""
    forward: float = 0.0
    """The model."""
    sample: float = 0.0
    """Choosing tokens from its logits."""
    output: float = 0.0
    """Taking the result in."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """One engine step."""

    stages: StageSeconds
    num_requests: int
    num_decode_tokens: int
    """Tokens of rows that had one token left to compute: one per decoding request."""
    num_prefill_tokens: int
    """All other tokens but guesses."""
    num_draft_tokens: int = 0
    """Guesses that were checked."""
    num_accepted_tokens: int = 0
    """Those of them that were right."""
    is_replayed: bool = False
    """Whether it was launched as a recorded graph."""

    @property
    def phase(self) -> str:
        """ "decode", "prefill" or "mixed": what the batch held."""
        if self.num_prefill_tokens == 0:
            return "decode"
        return "mixed" if self.num_decode_tokens else "prefill"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is, as of its last step. Counters are cumulative since the engine started."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    """Of those that wait: for another request that computes the page they begin with."""
    waiting_prefill_tokens: int = 0
    """Tokens still to compute, of waiting and running prompts; of those that wait, without what was cached when
    they came."""
    oldest_wait_seconds: float = 0.0
    pages: PageAccount = field(default_factory=lambda: PageAccount(0, 0, 0, 0))
    page_size: int = 16
    """Tokens."""
    eviction_age: float | None = None
    """Seconds since that was used which the next allocation evicts; None while pages are free."""
    cache: CacheStats = field(default_factory=CacheStats)
    num_steps: int = 0
    num_preemptions: int = 0
    num_swapped: int = 0
    """Of these preemptions: with KV copied to host memory."""
    host_pages: HostAccount = field(default_factory=HostAccount)
    num_finished: int = 0
    prefill_rate: float = 0.0
    """Uncached prompt tokens per second of engine time while prefilling, a moving average; 0 until measured."""
    decode_seconds: float = 0.0
    """Seconds of a step that only decodes, a moving average; 0 until measured."""
