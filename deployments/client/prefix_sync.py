"""Decides when an ingress asks which replica for the next part of its snapshot: hottest first, few at a time.

    unknown ── asked ──▶ part 1 ── asked ──▶ part 2 ── asked ──▶ ... ──▶ last part
               └─ of all replicas, before ──┘

A part has the most recently used prefixes among those that its replica has not reported yet, so the first parts of
all replicas come before the second of any. A large fleet's caches have tens of millions of blocks: an ingress
accepts requests when it knows the first parts, and spends at most half of its time on the others.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

MAX_ASKED = 2
"""Parts that are on their way at the same time: one is processed while another replica makes the next."""


class PrefixSync:
    """Asks the replicas in turn. Lives on one event loop."""

    def __init__(self, ask: Callable[[str], None]) -> None:
        """`ask` requests a replica's next part, which `took` reports; `begin` or `leave` also end the wait."""
        self._ask = ask
        self._num_parts: dict[str, int] = {}  # replica -> known parts, while more will come
        self._waiting: list[tuple[int, int, str]] = []  # heap: parts known, turn, replica; some are outdated
        self._num_turns = 0
        self._asked: set[str] = set()
        self._pause: asyncio.TimerHandle | None = None

    def begin(self, replica: str) -> None:
        """Learn a replica's cache from the start."""
        self._asked.discard(replica)
        self._wait(replica, 0)

    def took(self, replica: str, *, is_first: bool, is_last: bool, seconds: float) -> None:
        """Note that a part was processed, which took `seconds`. A first part may come unasked."""
        self._asked.discard(replica)
        if self._pause is None:
            self._pause = asyncio.get_running_loop().call_later(seconds, self._end_pause)
        if is_last:
            self._num_parts.pop(replica, None)
        else:
            self._wait(replica, 1 if is_first else self._num_parts.get(replica, 0) + 1)

    def leave(self, replica: str) -> None:
        """Stop asking a replica: it does not answer, or is gone."""
        self._asked.discard(replica)
        self._num_parts.pop(replica, None)
        self._ask_next()

    def close(self) -> None:
        """Stop asking all replicas."""
        self._num_parts.clear()
        if self._pause is not None:
            self._pause.cancel()

    def _wait(self, replica: str, num_parts: int) -> None:
        self._num_turns += 1
        self._num_parts[replica] = num_parts
        heapq.heappush(self._waiting, (num_parts, self._num_turns, replica))
        self._ask_next()

    def _end_pause(self) -> None:
        self._pause = None
        self._ask_next()

    def _ask_next(self) -> None:
        while self._waiting and self._pause is None and len(self._asked) < MAX_ASKED:
            num_parts, _, replica = heapq.heappop(self._waiting)
            if self._num_parts.get(replica) == num_parts and replica not in self._asked:
                self._asked.add(replica)
                self._ask(replica)
