"""Limits how often streams write, because the cost of sending a chunk does not grow with the tokens in it.

    tokens    t0   t1   t2   t3   t4   t5 ...      an ingress has 100 streams and writes 1000 chunks a second:
    chunks    t0   t1      t2+t3     t4+t5         each stream gets 10 of them, the first two immediately

Neither Serve's proxy nor a socket merges chunks: one that waits there delays all later ones, including first
tokens of new requests. An ingress therefore limits the chunks that it writes. While its streams together want
more, each gets an equal share, and tokens that arrive between two writes are merged in the generation
(`deployments/client/stream.py`). A stream whose tokens arrive more slowly than its share never waits.
"""

from __future__ import annotations

import asyncio
import math
from typing import Literal

BURST_S = 0.1
"""Seconds of unused share that may be made up for."""
AUTO_PER_CORE, AUTO_MOST = 1000.0, 8000.0
"""Chunks per second with `max_chunks_per_s: auto`: a chunk takes up to 0.1 ms of processor time, which an engine
on the same machine needs more when there are few cores. An ingress keeps two tenths of its own core for new
requests, whose work waits for the chunks that are written before it."""
PROXY_FACTOR = 4.0
"""How many times that a chunk takes which goes through Serve's proxy."""
MIN_WAIT_S = 0.002
"""Waits below this are skipped and added to the next wait: event loops have no finer timers."""


def chunks_per_s(setting: float | Literal["auto"] | None, cores: int, *, has_proxy: bool) -> float | None:
    """Return the limit that the setting `max_chunks_per_s` means on a machine with `cores` cores.

    `has_proxy` says whether each chunk goes through Serve's proxy too.
    """
    if setting != "auto":
        return setting
    return min(AUTO_PER_CORE * cores, AUTO_MOST) / (PROXY_FACTOR if has_proxy else 1.0)


class Pace:
    """The write budget that an ingress's streams share. Lives on one event loop."""

    def __init__(self, max_per_s: float | None) -> None:
        """Allow `max_per_s` chunks per second for all streams together; None sets no limit."""
        self.limit(max_per_s)
        self._num_open = 0
        self._paid_until = -math.inf

    def limit(self, max_per_s: float | None) -> None:
        """Allow this many from now on."""
        self._between_s = 0.0 if max_per_s is None else 1 / max_per_s

    def open(self) -> Turns:
        """Register a new stream."""
        self._num_open += 1
        return Turns(self)

    def write(self, now: float) -> bool:
        """Count a written chunk and return whether the budget is exceeded."""
        self._paid_until = max(self._paid_until, now - BURST_S) + self._between_s
        return self._paid_until > now

    @property
    def seconds(self) -> float:
        """Seconds between two chunks of a stream that uses no more than its share."""
        return self._num_open * self._between_s

    def close(self) -> None:
        """Unregister a stream that has ended."""
        self._num_open -= 1


class Turns:
    """One stream's share of a `Pace`."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._next_at = -math.inf
        self._is_open = True

    async def wait(self, num_merging: int = 1) -> None:
        """Wait after a chunk until the next may be written. `num_merging` choices each get the stream's share."""
        now, between = asyncio.get_running_loop().time(), self._pace.seconds / num_merging
        self._next_at = min(max(self._next_at, now - between), now) + between
        if self._pace.write(now) and self._next_at - now >= MIN_WAIT_S:
            await asyncio.sleep(self._next_at - now)

    def close(self) -> None:
        """End the stream. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._pace.close()
