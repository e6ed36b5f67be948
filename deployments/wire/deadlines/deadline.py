"""Deadlines for a peer: the time in which it must send, read or answer.

A deadline is over when its owner was awake for so long (`AwakeClock`), and has looked once more for arrivals:
event loops call due timers before they read, even if the data has been there for long.

    due ──▶ one pass over all sockets ──▶ cancelled or set again meanwhile? else `on_due`

All deadlines of an event loop share a timer, which reads the clock often enough.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol
from weakref import WeakValueDictionary

from engine.base.awake_clock import LOOK_S, AwakeClock

BETWEEN_S = 0.02
"""Shortest time between two looks, because each costs O(deadlines)."""
_EARLY_S = 0.001
"""How early a timer of an event loop may be."""


class Timed(Protocol):
    """A deadline in a `DeadlineWatch`."""

    due: float
    """Awake time of the event loop."""

    def fire(self) -> None:
        """End the wait, because it has taken too long."""
        ...


class DeadlineWatch:
    """The deadlines of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.now = AwakeClock(loop.time).now
        """Returns the event loop's awake time."""
        self._waiting: set[Timed] = set()
        self._first_due = math.inf  # none is due earlier
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at, self._looked_at = math.inf, -math.inf

    def add(self, waiting: Timed) -> None:
        """Watch a deadline until it fires or is removed."""
        self._waiting.add(waiting)
        self._first_due = min(self._first_due, waiting.due)
        if waiting.due < self._looks_at or self._timer is None:
            self._look_by(waiting.due)

    def remove(self, waiting: Timed) -> None:
        """Stop watching a deadline. Idempotent."""
        self._waiting.discard(waiting)

    def _look_by(self, due: float) -> None:
        now = self.now()
        self._looks_at = min(max(due, self._looked_at + BETWEEN_S), now + LOOK_S)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(self._looks_at + self.loop.time() - now, self._look)

    def _look(self) -> None:
        now = self._looked_at = self.now()
        self._timer, self._looks_at = None, math.inf
        if now + _EARLY_S >= self._first_due:
            self._end_due(now + _EARLY_S)
        if self._waiting:
            self._look_by(self._first_due)

    def _end_due(self, now: float) -> None:
        """End the due waits, after one more pass over the sockets. O(deadlines)."""
        due = [waiting for waiting in self._waiting if waiting.due <= now]
        self._first_due = min((waiting.due for waiting in self._waiting if waiting.due > now), default=math.inf)
        # The loop may not have read its sockets when it calls this, but it has when it calls the next callback.
        self.loop.call_soon(self._call_soon, due)

    def _call_soon(self, due: list[Timed]) -> None:
        for waiting in due:
            self.loop.call_soon(self._end, waiting)

    def _end(self, waiting: Timed) -> None:
        if waiting not in self._waiting:
            return
        if waiting.due > self.now() + _EARLY_S:
            self.add(waiting)
            return
        self._waiting.remove(waiting)
        waiting.fire()


_watches: WeakValueDictionary[int, DeadlineWatch] = WeakValueDictionary()
"""By the id of the event loop. Deadlines and timers keep them alive."""


def watch_of(loop: asyncio.AbstractEventLoop) -> DeadlineWatch:
    """Return the deadlines of an event loop."""
    watch = _watches.get(id(loop))
    if watch is None or watch.loop is not loop:  # the id may have belonged to another loop
        watch = _watches[id(loop)] = DeadlineWatch(loop)
    return watch


def awake_now() -> float:
    """Return the running event loop's awake time. Each call reads its clock: make several in `STILL_S`."""
    return watch_of(asyncio.get_running_loop()).now()


class Deadline:
    """One task of a peer at a time, with its deadline."""

    __slots__ = ("_on_due", "_watch", "due")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watch = watch_of(loop)
        self._on_due: Callable[[], None] | None = None
        self.due = math.inf

    def set(self, seconds: float, on_due: Callable[[], None]) -> None:
        """Call `on_due` in so many seconds, instead of the previous callback."""
        self.due, self._on_due = self._watch.now() + seconds, on_due
        self._watch.add(self)

    def cancel(self) -> None:
        """Cancel the callback. Idempotent."""
        self._on_due = None
        self._watch.remove(self)

    def fire(self) -> None:
        """Call the callback: the time is over."""
        on_due, self._on_due = self._on_due, None
        if on_due is not None:
            on_due()
