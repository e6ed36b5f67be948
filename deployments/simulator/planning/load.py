"""Computes how many replicas a load needs, with the autoscaler's own rule (`needed_replicas`).

    busy     arrivals * uncached prompt tokens / prefill rate         share of the time that prefill takes
    queue    busy / (1 - busy) * time of one prompt's prefill         seconds; M/M/1, as prompts vary in length;
                                                                      in a pipeline the time in its slowest stage
    running  arrivals * time of a request in the batch                Little's law; decodes get the idle share
    KV       running * pages of a request halfway through / pages     or running / places in the batch, if larger

One replica's part of the load must need at most one replica. The autoscaler reaches the same number from below
with the same load if it gives queues no time to become shorter (`catch_up_s` 0), because queues in a plan are
stationary. Prefixes that running requests share are counted for each, so high hit rates need less memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deployments.replica.autoscaling import ReplicaWork, Targets, needed_replicas
from deployments.simulator.planning.replica import ReplicaPlan

STEADY = Targets(catch_up_s=0.0)
"""The autoscaler's targets for a constant load, whose queues do not become shorter either."""
_ROUNDING = 1e-9
_ROUNDS = 60
_MOST_RUNNING = 2.0**30
MAX_REPLICAS = 1 << 20


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The shape of all requests of a load. Raises ValueError for impossible values."""

    prompt_tokens: int = 1024
    output_tokens: int = 256
    hit_rate: float = 0.0
    """Share of prompt tokens whose KV is already in the cache, 0 to 1."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError("a request has at least 1 prompt token and 1 output token")
        if not 0 <= self.hit_rate <= 1:
            raise ValueError(f"the hit rate must be from 0 to 1, got {self.hit_rate}")

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens."""
        return self.prompt_tokens + self.output_tokens

    @property
    def uncached_tokens(self) -> float:
        """Prompt tokens to compute, at least the last one."""
        return max(self.prompt_tokens * (1 - self.hit_rate), 1.0)

    @property
    def context(self) -> float:
        """Number of tokens when half of the output is generated."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Operation:
    """The state of one replica under load. Values are infinite if it cannot keep up."""

    busy_share: float
    queued_prefill_s: float
    num_running: float
    kv_share: float
    ttft_s: float
    """Estimated mean in seconds: queue, prefill and one step."""
    itl_s: float
    """Estimated mean inter-token latency in seconds, including the prefill of other requests."""

    @property
    def work(self) -> ReplicaWork:
        """The work that the replica would report to the autoscaler."""
        return ReplicaWork(self.queued_prefill_s, self.busy_share, self.kv_share)


def operate(replica: ReplicaPlan, request: RequestShape, requests_per_s: float) -> Operation:
    """Return the state of one replica that receives `requests_per_s` requests."""
    rate = replica.prefill_tokens_per_s(request.prompt_tokens, request.uncached_tokens)
    prefill_s = request.uncached_tokens / rate
    busy = requests_per_s * prefill_s
    idle = 1.0 - busy
    queue = busy / idle * prefill_s if idle > 0 else math.inf
    alone_s = replica.prefill_s(request.uncached_tokens, request.prompt_tokens)
    decoding = _decoding(replica, request, requests_per_s * request.output_tokens, idle)
    running = decoding + requests_per_s * alone_s  # without a pipeline, one is in prefill for the busy share
    pages = running * replica.pages_of(request.context) / replica.num_pages
    kv_share = max(pages, running / replica.engine.max_running)
    step = replica.decode_step_s(decoding, request.context) / idle if math.isfinite(decoding) else math.inf
    return Operation(busy, queue, running, kv_share, queue + alone_s + step, step)


def _decoding(replica: ReplicaPlan, request: RequestShape, tokens_per_s: float, idle: float) -> float:
    """Return the number of decoding requests: tokens/s times the time of a step, which grows with that number."""

    def arriving(running: float) -> float:
        return tokens_per_s * replica.decode_step_s(running, request.context) / idle

    if idle <= 0:
        return math.inf
    high = 1.0
    while arriving(high) > high:
        high *= 2
        if high > _MOST_RUNNING:
            return math.inf
    low = 0.0
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if arriving(middle) > middle else (low, middle)
    return high


def replicas_for(
    replica: ReplicaPlan, request: RequestShape, requests_per_s: float, targets: Targets | None = None
) -> int:
    """Return the fewest replicas that carry the load within the targets. More load never needs fewer.

    Raises ValueError when a single request does not fit in a replica, or no number of replicas is enough.
    """
    targets = targets or STEADY
    if not 0 < requests_per_s < math.inf:
        raise ValueError(f"requests per second must be above 0, got {requests_per_s}")
    if targets.ttft_target_s <= 0:
        raise ValueError(f"the TTFT target must be above 0 seconds, got {targets.ttft_target_s}")
    room = min(replica.num_tokens, replica.longest_request)
    if request.num_tokens > room:
        raise ValueError(
            f"a request of {request.num_tokens:,} tokens does not fit: a replica has room for {room:,}"
        )

    def is_enough(count: int) -> bool:
        work = operate(replica, request, requests_per_s / count).work
        return needed_replicas(targets, [work]) <= 1 + _ROUNDING

    high = 1
    while not is_enough(high):
        high *= 2
        if high > MAX_REPLICAS:
            raise ValueError(f"more than {MAX_REPLICAS:,} replicas would be needed: lower the load")
    low = high // 2  # not enough, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
