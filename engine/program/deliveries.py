"""Delivers the new tokens of streams; those of short steps are delivered together.

    steps      s0   s1   s2   s3   s4   ...       2 ms each, with `engine.stream_interval_ms` 8
    delivered  t0             t1-t4               the first token of a stream immediately, then every 8 ms

A delivery costs its readers as much for one token as for several: a message, a turn of an event loop, a write to
each client. Tokens wait only if the next step is expected to end within the interval, so no timer is needed and no
long step delays them; first tokens and ends never wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from engine.values.stream_delta import StreamDelta


class Deliveries:
    """Deltas that were not delivered yet. Only the loop's thread uses it."""

    def __init__(self, interval_s: float) -> None:
        self.deliver: Callable[[list[StreamDelta]], None] = lambda deltas: None
        self._interval_s = interval_s
        self._held: dict[str, StreamDelta] = {}
        self._is_urgent = False
        self._begun: set[str] = set()
        """Streams that have had a delivery."""
        self._delivered_at = -math.inf

    def add(self, deltas: Iterable[StreamDelta]) -> None:
        """Add the new deltas of streams."""
        for delta in deltas:
            id_ = delta.request_id
            if delta.finish_reason is not None:
                self._begun.discard(id_)
                self._is_urgent = True
            elif id_ not in self._begun:
                self._begun.add(id_)
                self._is_urgent = True
            if (held := self._held.get(id_)) is None:
                self._held[id_] = delta
            else:
                held.add(delta)

    def settle(self, now: float, next_at: float) -> None:
        """Deliver the held deltas, unless all of them can wait until `next_at`, when the next step should end."""
        if not self._held or not (self._is_urgent or next_at > self._delivered_at + self._interval_s):
            return
        held, self._held = list(self._held.values()), {}
        self._is_urgent, self._delivered_at = False, now
        self.deliver(held)
