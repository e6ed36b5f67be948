"""What it costs to run a prompt on a replica, in seconds: `Q + w*P + D + X`.

    Q  queue     prefill work that waits there already, and the wait for a place in the batch
    P  prefill   this prompt's tokens that are not cached there, at the replica's measured rate
    w            1 / (1 - utilisation): work put into a busy fleet delays all who come after (M/M/1's sensitivity)
    D  decode    how much slower the requests running there get; steep when their KV fills the memory
    X  evict     what inserting the prompt pushes out of the cache, at the replica's price

Q and P delay this request, (w - 1)*P + D + X others: the sum is the marginal cost of the placement to all.
Pure functions of what a router knows at a moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica to choose among: what its router knows of it at a moment."""

    replica: str
    queued_prefill_tokens: float
    """Uncached prompt tokens that wait there, this ingress's own dispatches that it has not heard of included."""
    num_running: int
    """Requests running or waiting there."""
    pages_free: int
    """KV pages that are free or can be evicted."""
    pages_total: int
    evict_price: float
    """Seconds of recompute per token that inserting here evicts; 0 while pages are free."""
    prefill_rate: float
    """Measured uncached prefill tokens/s; a default until measured. Above 0."""
    decode_tokens_per_s: float
    """Measured, all running requests together; 0 while unknown."""
    is_available: bool
    """False while it drains, is lost, its circuit is open or its queue is full."""
    page_size: int = 16
    """Tokens to a KV page."""
    max_running: int = 0
    """Requests that it runs at once, more wait; 0 unknown."""
    finish_rate: float = 0.0
    """Requests it finished per second lately; 0 unknown."""


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """One prompt to place."""

    num_tokens: int
    overlap: Mapping[str, int]
    """Leading tokens of the prompt that each replica holds; 0 may be left out."""
    key: int
    """Hash of the prompt's beginning, as far as it is worth keeping together; for rendezvous."""
    session: str | None
    utilisation: float
    """Share of the fleet's prefill capacity in use, 0..1."""
    chain: Sequence[int] = ()
    """The prompt's block hashes, for policies that keep a tree of their own; no policy of Raydix reads it."""


@dataclass(frozen=True, slots=True)
class Terms:
    """One replica's cost for one prompt, in seconds, and the tokens it holds."""

    queue: float
    prefill: float
    """w * P."""
    decode: float
    evict: float
    total: float
    overlap: int


@dataclass(frozen=True, slots=True)
class CostSettings:
    """The cost has one knob, and that is a cap."""

    max_weight: float = 10.0
    """Most that w can be: at utilisation 0.9 and above. Without it an overloaded fleet would ignore all queues."""
    max_pressure: float = 100.0
    """Most that a full KV memory multiplies the time of a decode step by."""

    def __post_init__(self) -> None:
        if self.max_weight < 1.0:
            raise ValueError(f"max_weight must be at least 1, got {self.max_weight}")
        if self.max_pressure <= 0.0:
            raise ValueError(f"max_pressure must be above 0, got {self.max_pressure}")


DEFAULT_COST = CostSettings()
DEFAULT_FINISH_RATE = 1.0
"""Requests/s of a replica that is full and has not finished any lately."""

REUSE_S = 300.0
"""Seconds without use after which a cached token is half as likely to be asked for again. Recorded conversations
reuse half of their tokens within 135 s and 90 % within 530 s."""


def prefill_weight(utilisation: float, max_weight: float) -> float:
    """w: seconds of delay, to this request and to those behind it, per second of prefill work. At least 1."""
    idle = 1.0 - max(utilisation, 0.0)
    return max_weight if idle * max_weight <= 1.0 else 1.0 / idle


def uncached_tokens(num_tokens: int, overlap: int) -> int:
    """Tokens of the prompt to compute; the last one always is, since its logits are wanted."""
    return max(num_tokens - overlap, 1)


def evict_price(age: float | None, prefill_rate: float, reuse_s: float = REUSE_S) -> float:
    """Seconds of recompute that each evicted token is likely to cost: its price when it is asked for again, times
    how likely that is after `age` seconds without use. 0 while pages are free (`age` None) or no rate is known.
    """
    if age is None or not prefill_rate:
        return 0.0
    return float(0.5 ** (age / reuse_s)) / prefill_rate


def queue_seconds(replica: Candidate) -> float:
    """Q: until a new request is begun there: the prefill of those before it, and until one of the places in the
    batch is free. A replica that runs as many as it can has nothing to prefill and is still no place to go.
    """
    waiting = replica.queued_prefill_tokens / replica.prefill_rate
    beyond = replica.num_running + 1 - replica.max_running
    if replica.max_running and beyond > 0:
        waiting += beyond / (replica.finish_rate or DEFAULT_FINISH_RATE)
    return waiting


def cost(query: RouteQuery, replica: Candidate, settings: CostSettings = DEFAULT_COST) -> Terms:
    """The cost of `query` on `replica`. More overlap never costs more; twice all rates (evict_price is the inverse
    of one) halves every term.

    Raises ValueError for a prefill rate that is not above 0.
    """
    rate = replica.prefill_rate
    if not rate > 0.0:
        raise ValueError(f"the prefill rate of {replica.replica} must be above 0 tokens/s, got {rate}")
    overlap = query.overlap.get(replica.replica, 0)
    num_uncached = uncached_tokens(query.num_tokens, overlap)
    queue = queue_seconds(replica)
    prefill = prefill_weight(query.utilisation, settings.max_weight) * num_uncached / rate
    decode = decode_slowdown(query.num_tokens, replica, settings.max_pressure)
    evict = replica.evict_price * num_uncached
    return Terms(queue, prefill, decode, evict, queue + prefill + decode + evict, overlap)


def decode_slowdown(num_tokens: int, replica: Candidate, max_pressure: float = DEFAULT_COST.max_pressure) -> float:
    """D: a decode step's time times how full this prompt makes the KV memory, as fill² / (1 - fill).

    A step takes num_running / decode_tokens_per_s; while that rate is unknown a decode token counts as a prefill
    token, which it never undercuts. All of the prompt counts, cached or not: cached pages that were
    evictable are held from now on. Near nothing at half full; from there on requests are preempted for each other.
    """
    if replica.pages_total <= 0 or not replica.num_running:
        return 0.0
    step = replica.num_running / (replica.decode_tokens_per_s or replica.prefill_rate)
    idle = (replica.pages_free - num_tokens / replica.page_size) / replica.pages_total
    fill = min(max(1.0 - idle, 0.0), 1.0)
    pressure = max_pressure if (1.0 - fill) * max_pressure <= fill * fill else fill * fill / (1.0 - fill)
    return step * pressure
