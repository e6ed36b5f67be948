"""Limits the requests of a batch in flight to as many as the API accepts.

an answer     the limit grows, by one for each round of answers
a refusal     the limit falls to those still in flight, which the API accepted; when one ends, the next is sent
... of all    none is in flight whose end would show room: the next one waits for as long as the API asked
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pauses if the API states none, which double from the first to the longest; no pause is ever longer."""


class Throttle:
    """Bounds the requests in flight. Lives on one event loop. `enter` is followed by one of the others."""

    def __init__(self, most: int) -> None:
        """At most `most` are in flight."""
        self._most, self._limit = most, float(most)
        self._num_out = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_paused = self._is_open = False
        self._pause_s = FIRST_PAUSE_S
        self._stuck_since: float | None = None

    @property
    def stuck_s(self) -> float:
        """Seconds since the API began to refuse although nothing was in flight; 0 while it accepts requests."""
        return 0.0 if self._stuck_since is None else asyncio.get_running_loop().time() - self._stuck_since

    async def enter(self) -> None:
        """Wait until a request may be sent."""
        if self._has_room() and not self._waiting:
            self._num_out += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
            else:  # Its turn had just come, so another request gets it.
                self.left()
            raise

    def answered(self) -> None:
        """Note that a request was answered: the API has room."""
        self._limit = min(self._most, self._limit + 1 / self._limit)
        self.left()

    def refused(self, retry_after_s: float | None) -> None:
        """Note that the API refused a request, or could not be reached."""
        self._num_out -= 1
        self._limit = max(1.0, min(self._limit, self._num_out))
        if self._num_out == 0:
            self._pause(retry_after_s)
        self._give_turns()

    def left(self) -> None:
        """Note that a request that the API accepted is no longer in flight."""
        self._num_out -= 1
        self._pause_s, self._stuck_since = FIRST_PAUSE_S, None
        self._give_turns()

    def open(self) -> None:
        """Remove the limit from now on: all waiting requests may enter."""
        self._is_open = True
        self._give_turns()

    def _pause(self, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        if self._stuck_since is None:
            self._stuck_since = loop.time()
        self._is_paused = True
        loop.call_later(min(seconds or self._pause_s, LONGEST_PAUSE_S), self._resume)
        self._pause_s *= 2

    def _resume(self) -> None:
        self._is_paused = False
        self._give_turns()

    def _has_room(self) -> bool:
        return self._is_open or (self._num_out < int(self._limit) and not self._is_paused)

    def _give_turns(self) -> None:
        while self._waiting and self._has_room():
            turn = self._waiting.popleft()
            if not turn.cancelled():
                self._num_out += 1
                turn.set_result(None)
