"""The cost of running a prompt on a replica, in seconds: `Q + w*P + L + D + X`.

    Q  queue     prefill work that waits there already, and the wait for a place in the batch
    P  prefill   this prompt's tokens that are not cached there, at the replica's measured rate
    w            1 / (1 - utilisation): work added to a busy fleet delays all later requests (M/M/1's sensitivity)
    L  load      copying what it holds of the prompt in host memory or below to its device
    D  decode    the slowdown of the requests that run there; steep when their KV fills the memory
    X  evict     what inserting the prompt evicts from the cache, at the replica's price

Q, P and L delay this request, (w - 1)*P + D + X delay others: the sum is the marginal cost of the placement to
all.
All functions are pure, over what a router knows at one moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.base.structs import Struct
from router.lower_tiers import Below
from router.overlap import Overlap


class Candidate(Struct, frozen=True, gc=False):
    """A replica to choose among, as its router knows it at one moment. A change of its state makes a new one."""

    replica: str
    queued_prefill_tokens: float
    """Uncached prompt tokens that wait there, with this ingress's dispatches that no heartbeat counts yet."""
    num_running: int
    """Requests running or waiting there."""
    pages_free: int
    """KV pages that are free or can be evicted."""
    pages_total: int
    evict_price: float
    """Seconds of recomputation per token that inserting here evicts; 0 while pages are free."""
    prefill_rate: float
    """Measured uncached prefill tokens/s; a default until measured. Above 0."""
    decode_tokens_per_s: float
    """Measured decode tokens/s of all running requests together; 0 while unknown."""
    is_available: bool
    """False while it drains, is lost, its circuit is open or its queue is full."""
    page_size: int = 16
    """Tokens of a KV page."""
    max_running: int = 0
    """Most requests that it runs at the same time; 0 while unknown."""
    finish_rate: float = 0.0
    """Requests per second that it finished lately; 0 while unknown."""
    load_rates: tuple[float, ...] = ()
    """Tokens/s whose KV it copies to its device, by the tier below it: host memory first."""


class RouteQuery(Struct, frozen=True, gc=False):
    """A prompt to place."""

    num_tokens: int
    overlap: Mapping[str, int]
    """Leading tokens of the prompt that each replica holds; zeros may be omitted."""
    key: int
    """Hash of the prompt's first blocks: rendezvous hashing keeps prompts with the same key on one replica."""
    session: str | None
    utilisation: float
    """Share of the fleet's prefill capacity in use, 0..1."""
    chain: Sequence[int] = ()
    """The prompt's block hashes, for policies that keep a tree of their own; no policy of Raydix reads it."""


@dataclass(frozen=True, slots=True)
class Terms:
    """A replica's cost for a prompt, in seconds, and the prompt tokens that it holds."""

    queue: float
    prefill: float
    """w * P, not only P."""
    decode: float
    evict: float
    total: float
    overlap: int
    load: float
    below: Below
    """The part of `overlap` in each tier below the device, the fastest first."""


@dataclass(frozen=True, slots=True)
class CostSettings:
    """Caps on the cost terms."""

    max_weight: float = 10.0
    """Highest w, reached at utilisation 0.9. Without this cap an overloaded fleet would ignore all queues."""
    max_pressure: float = 100.0
    """Highest factor by which a full KV memory multiplies the time of a decode step."""

    def __post_init__(self) -> None:
        if self.max_weight < 1.0:
            raise ValueError(f"max_weight must be at least 1, got {self.max_weight}")
        if self.max_pressure <= 0.0:
            raise ValueError(f"max_pressure must be above 0, got {self.max_pressure}")


DEFAULT_COST = CostSettings()
DEFAULT_FINISH_RATE = 1.0
"""Requests/s assumed for a full replica that has finished none recently."""

REUSE_S = 300.0
"""Seconds without use after which a cached token is half as likely to be used again. Recorded conversations
reuse half of their tokens within 135 s and 90 % within 530 s."""


def prefill_weight(utilisation: float, max_weight: float) -> float:
    """Return w: seconds of delay to this and all later requests per second of prefill work. At least 1."""
    idle = 1.0 - max(utilisation, 0.0)
    return max_weight if idle * max_weight <= 1.0 else 1.0 / idle


def uncached_tokens(num_tokens: int, overlap: int) -> int:
    """Count the prompt tokens to compute. The last one always is one: its logits are needed."""
    return max(num_tokens - overlap, 1)


def evict_price(age: float | None, prefill_rate: float, reuse_s: float = REUSE_S) -> float:
    """Return the seconds of recomputation that each evicted token is likely to cost.

    That is its prefill time, times the probability that it is used again after `age` seconds without use. It is 0
    while pages are free (`age` None) or no rate is known.
    """
    if age is None or not prefill_rate:
        return 0.0
    return float(0.5 ** (age / reuse_s)) / prefill_rate


def queue_seconds(replica: Candidate) -> float:
    """Return Q, the seconds until a new request starts there: the prefill work before it, and the wait for a
    place in the batch. A replica with a full batch is a bad choice even if nothing waits for prefill.
    """
    waiting = replica.queued_prefill_tokens / replica.prefill_rate
    beyond = replica.num_running + 1 - replica.max_running
    if replica.max_running and beyond > 0:
        waiting += beyond / (replica.finish_rate or DEFAULT_FINISH_RATE)
    return waiting


def cost(query: RouteQuery, replica: Candidate, settings: CostSettings = DEFAULT_COST) -> Terms:
    """Return the cost of `query` on `replica`. More overlap never costs more; doubling all rates (`evict_price` is
    the inverse of one) halves every term.

    Raises ValueError for a prefill rate that is not above 0.
    """
    rate = replica.prefill_rate
    if not rate > 0.0:
        raise ValueError(f"the prefill rate of {replica.replica} must be above 0 tokens/s, got {rate}")
    overlap = query.overlap.get(replica.replica, 0)
    num_uncached = uncached_tokens(query.num_tokens, overlap)
    below: Below = ()
    load = 0.0
    if overlap and isinstance(query.overlap, Overlap) and query.overlap.has_lower:
        below = query.overlap.below(replica.replica)
        load = load_seconds(below, replica)
    queue = queue_seconds(replica)
    prefill = prefill_weight(query.utilisation, settings.max_weight) * num_uncached / rate
    decode = decode_slowdown(query.num_tokens, replica, settings.max_pressure)
    evict = replica.evict_price * num_uncached
    total = queue + prefill + load + decode + evict
    return Terms(queue, prefill, decode, evict, total, overlap, load, below)


def load_seconds(below: Below, replica: Candidate) -> float:
    """Return L, the seconds until the tokens in each tier below the device are on it. Tokens that a replica would
    compute sooner than load are computed.
    """
    seconds = 0.0
    for tier, tokens in enumerate(below):
        rate = replica.load_rates[tier] if tier < len(replica.load_rates) else 0.0
        seconds += tokens / max(rate, replica.prefill_rate)
    return seconds


def decode_slowdown(num_tokens: int, replica: Candidate, max_pressure: float = DEFAULT_COST.max_pressure) -> float:
    """Return D, the time of a decode step times fill² / (1 - fill), where fill includes this prompt's KV.

    A step takes num_running / decode_tokens_per_s seconds; while that rate is unknown a decode token counts as a
    prefill token, which is never more expensive. The whole prompt counts, cached or not: from now on its cached
    pages cannot be evicted. D is small at half fill; near full memory requests preempt each other.
    """
    if replica.pages_total <= 0 or not replica.num_running:
        return 0.0
    step = replica.num_running / (replica.decode_tokens_per_s or replica.prefill_rate)
    idle = (replica.pages_free - num_tokens / replica.page_size) / replica.pages_total
    fill = min(max(1.0 - idle, 0.0), 1.0)
    pressure = max_pressure if (1.0 - fill) * max_pressure <= fill * fill else fill * fill / (1.0 - fill)
    return step * pressure
