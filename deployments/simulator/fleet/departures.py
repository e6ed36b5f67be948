"""Replicas whose machine ends at an announced time, and what they hand over before, as ingresses do it.

notice ─▶ no new requests ─▶ streams and prefixes move, in an order ─▶ end: what is left is lost
                             `router/fetch/worth_moving.py`, as in deployments/client/hand_overs.py
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from deployments.simulator.fleet.replica import Job, SimulatedReplica
from deployments.simulator.fleet.scenario import HandOver
from deployments.simulator.fleet.trace import TraceRequest
from router.fetch.hot_prefixes import HotPrefix
from router.fetch.worth_moving import (
    NUM_AT_ONCE,
    chance_of_running,
    moving_seconds,
    worth_of_prefix,
    worth_of_stream,
)


@dataclass(slots=True)
class Figures:
    """Streams and tokens that the replicas of all notices handed over or lost."""

    num_streams: int = 0
    """Streams that were handed over."""
    stream_tokens: int = 0
    prefix_tokens: int = 0
    """Tokens of prefixes that others received."""
    used_tokens: int = 0
    """Those of them that a later prompt found at their new replica before another had computed them."""
    num_lost: int = 0
    """Streams that were lost at the end."""
    lost_tokens: int = 0


@dataclass(slots=True, eq=False)
class Departure:
    """One replica between its notice and its end."""

    replica: SimulatedReplica
    ends_at: float
    order: HandOver
    prefixes: list[tuple[float, Job]]
    """Prefixes that only it holds, each as a request, and the tokens per second that moving it saves."""
    rate: float
    """Tokens/s of each of its transfers."""
    rng: random.Random
    finish_rate: float
    """Requests that it finished per second until the notice."""
    moving: list[Job] = field(default_factory=list)

    def begin(
        self,
        now: float,
        is_moving: Callable[[Job], bool],
        move_stream: Callable[[Job], None],
        move_prefix: Callable[[Job], None],
    ) -> None:
        """Begin the transfers for which there is room and time."""
        if self.order == "nothing":
            return
        while True:
            self.moving = [job for job in self.moving if is_moving(job)]
            if len(self.moving) >= NUM_AT_ONCE:
                return
            in_time = [item for item in self._items(now) if now + item[1] <= self.ends_at]
            if not in_time:
                return
            if self.order == "worth":
                _, _, job, is_stream = max(in_time, key=lambda item: item[0])
            else:
                _, _, job, is_stream = self.rng.choice(in_time)
            self.moving.append(job)
            if is_stream:
                move_stream(job)
            else:
                self.prefixes = [each for each in self.prefixes if each[1] is not job]
                move_prefix(job)

    def _items(self, now: float) -> Iterator[tuple[float, float, Job, bool]]:
        """Yield the worth per second, the seconds, the request, and whether it is a stream."""
        streams = self.replica.decoding(now)
        chance = chance_of_running(self.ends_at - now, self.finish_rate, len(streams))
        for job in streams:
            worth = worth_of_stream(job.num_tokens, self.rate, chance)
            yield worth, moving_seconds(job.num_tokens, self.rate), job, True
        for worth, job in self.prefixes:
            yield worth, moving_seconds(job.num_tokens, self.rate), job, False


def as_requests(
    prefixes: Sequence[HotPrefix], chain: Callable[[Sequence[int]], tuple[int, ...]], block_tokens: int,
    rate: float, horizon_s: float, now: float,
) -> list[tuple[float, Job]]:  # fmt: skip
    """Return prefixes of blocks as requests, with the tokens per second that moving each of them saves."""
    found = []
    for prefix in prefixes:
        blocks = tuple(prefix.token_ids)
        request = TraceRequest(now, len(blocks) * block_tokens, 1, blocks)
        worth = worth_of_prefix(prefix, rate / block_tokens, horizon_s) * block_tokens
        found.append((worth, Job(request, chain(blocks), 0, now)))
    return found
