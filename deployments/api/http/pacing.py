"""How often streams write: what a chunk costs on its way out does not grow with the tokens in it.

    tokens    t0   t1   t2   t3   t4   t5 ...      an ingress has 100 streams and writes 1000 chunks a second:
    chunks    t0   t1      t2+t3     t4+t5         each has 10 of them, the first two at once

A chunk goes through Ray Serve's proxy, where nothing merges any more: one that waits there makes all that come
after it late, new requests' first tokens too. So an ingress writes no more than it is told to. While its streams
together want more, each has an equal share, and what comes between two writes is merged where it lies anyway, in
the generation (`deployments/client/stream.py`). A stream whose tokens are slower than its share never waits.
"""

from __future__ import annotations

import asyncio
import math
from typing import Literal

BURST_S = 0.1
"""What was not written for so long may be made up for."""
AUTO_PER_CORE, AUTO_MOST = 250.0, 1000.0
"""Where nobody says how many: a chunk takes some 0.7 ms of processor time on its way, and where cores are few an
engine on the same machine has better use for it."""
MIN_WAIT_S = 0.002
"""Shorter waits are left out, and made up for by the next: event loops tell no finer time."""


def chunks_per_s(setting: float | Literal["auto"] | None, cores: int) -> float | None:
    """What the limit `max_chunks_per_s` says on a machine with so many cores."""
    return min(AUTO_PER_CORE * cores, AUTO_MOST) if setting == "auto" else setting


class Pace:
    """Of one ingress: what may be written, and how many streams share it. Lives on one event loop."""

    def __init__(self, max_per_s: float | None) -> None:
        """`max_per_s` chunks of all streams together, per second; None: as many as come."""
        self._between_s = 0.0 if max_per_s is None else 1 / max_per_s
        self._num_open = 0
        self._paid_until = -math.inf

    def open(self) -> Turns:
        """A stream begins."""
        self._num_open += 1
        return Turns(self)

    def write(self, now: float) -> bool:
        """A chunk was written. Whether they are too many."""
        self._paid_until = max(self._paid_until, now - BURST_S) + self._between_s
        return self._paid_until > now

    @property
    def seconds(self) -> float:
        """Between two chunks of a stream that has no more than its share."""
        return self._num_open * self._between_s

    def close(self) -> None:
        """One has ended."""
        self._num_open -= 1


class Turns:
    """One stream's."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._next_at = -math.inf
        self._is_open = True

    async def wait(self, num_merging: int = 1) -> None:
        """After a chunk, until the next may be written. A stream of several choices writes as often for each."""
        now, between = asyncio.get_running_loop().time(), self._pace.seconds / num_merging
        self._next_at = min(max(self._next_at, now - between), now) + between
        if self._pace.write(now) and self._next_at - now >= MIN_WAIT_S:
            await asyncio.sleep(self._next_at - now)

    def close(self) -> None:
        """It is over. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._pace.close()
