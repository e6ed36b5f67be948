"""Hands on what streams gain: tokens of steps that follow each other closely go together.

    steps      s0   s1   s2   s3   s4   ...       2 ms each, with `engine.stream_interval_ms` 8
    delivered  t0             t1-t4               the first token of a stream at once, then all 8 ms

A delivery costs its readers as much for one token as for several: a message, a turn of an event loop, a write to
each client. Tokens wait only while the step that comes next is expected to end within the interval, so no timer is
needed and no long step comes between; first tokens and ends never wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from engine.values.stream_delta import StreamDelta


class Deliveries:
    """What was gained and not handed on. It is used by the loop's thread alone."""

    def __init__(self, interval_s: float) -> None:
        self.deliver: Callable[[list[StreamDelta]], None] = lambda deltas: None
        self._interval_s = interval_s
        self._held: dict[str, StreamDelta] = {}
        self._is_urgent = False
        self._begun: set[str] = set()
        """Streams of which something was handed on."""
        self._delivered_at = -math.inf

    def add(self, deltas: Iterable[StreamDelta]) -> None:
        """Take what streams have gained."""
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
        """Hand on what is held, unless all of it can wait until `next_at`, when the next chance is expected."""
        if not self._held or not (self._is_urgent or next_at > self._delivered_at + self._interval_s):
            return
        held, self._held = list(self._held.values()), {}
        self._is_urgent, self._delivered_at = False, now
        self.deliver(held)
