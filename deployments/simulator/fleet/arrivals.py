"""Arrival times of requests: a trace's ticks spread out, its clock scaled to a load, bursts added."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from itertools import pairwise

from deployments.simulator.fleet.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Burst:
    """A period in which requests come `factor` times as fast."""

    factor: float
    start: float
    """Seconds after the first arrival."""
    seconds: float

    def __post_init__(self) -> None:
        if not (self.factor >= 1.0 and self.start >= 0.0 and self.seconds > 0.0):
            raise ValueError(f"a burst makes requests come at least once as fast, for more than 0 s; got {self}")

    @classmethod
    def parse(cls, text: str) -> Burst:
        """From "FACTOR@START+SECONDS", such as "10@600+300". Raises ValueError for anything else."""
        number = r"(\d+(?:\.\d+)?)"
        found = re.fullmatch(rf"{number}@{number}\+{number}", text.strip())
        if found is None:
            raise ValueError(
                "a burst is FACTOR@START+SECONDS, such as 10@600+300 for ten times as much from second 600 on for "
                f"300 s; got {text!r}"
            )
        return cls(float(found[1]), float(found[2]), float(found[3]))

    def moved(self, time: float) -> float:
        """Return when a request comes that would come at `time` without the burst. Monotonic."""
        inside = max(0.0, min(time - self.start, self.seconds * self.factor))
        return time - inside + inside / self.factor


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests with their arrival times, in order."""

    times: tuple[float, ...]
    """Seconds."""
    requests: tuple[TraceRequest, ...]
    compression: float
    """Seconds of the trace per second of the simulation."""

    def with_burst(self, burst: Burst) -> Arrivals:
        """Return the same requests, with those in the burst closer together and later ones earlier."""
        return replace(self, times=tuple(map(burst.moved, self.times)))


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
