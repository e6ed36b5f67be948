"""Compute when requests reach the fleet: spread out a trace's ticks, and scale its clock to an offered load."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

from router.simulator.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests with their arrival times, in order."""

    times: tuple[float, ...]
    """Seconds."""
    requests: tuple[TraceRequest, ...]
    compression: float
    """Seconds of the trace per second of the simulation."""


def tick_of(trace: Trace) -> float:
    """Return the seconds by which a trace's clock advances, if requests share its readings; else 0.

    A recorder whose clock advances every few seconds records bursts that did not exist.
    """
    times = sorted({request.time for request in trace.requests})
    if len(times) < 2 or 2 * len(times) > len(trace.requests):
        return 0.0
    return min(after - before for before, after in pairwise(times))


def arrivals(trace: Trace, load: float, fleet_rate: float, seed: int) -> Arrivals:
    """Spread the requests of each tick uniformly at random, and scale the trace's clock.

    `load`: prompt tokens offered per second, which the fleet would have to compute without any cache, as a share
    of `fleet_rate` (prefill tokens/s of all replicas).
    """
    rng = random.Random(f"{seed}/arrivals")
    tick = tick_of(trace)
    spread = sorted(
        ((request.time + tick * rng.random(), index) for index, request in enumerate(trace.requests)),
    )
    duration = spread[-1][0] - spread[0][0] + (tick or 0.0)
    if duration <= 0.0:
        duration = 1.0
    wanted = trace.num_prompt_tokens / (load * fleet_rate)
    compression = duration / wanted
    start = spread[0][0]
    times = tuple((time - start) / compression for time, _ in spread)
    return Arrivals(times, tuple(trace.requests[index] for _, index in spread), compression)
