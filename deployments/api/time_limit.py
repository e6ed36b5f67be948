"""Time limits for code that waits for every token.

`asyncio.timeout` sets and cancels a timer for each wait. A `TimeLimit` is used for many waits, and all limits of
an event loop share a timer, which looks when it fires whose present wait has taken too long.

    waits      ├──┤ ├─┤ ├──┤      ├───────────────── TimeoutError
    timer      └────────────▶ looks, and again when the next wait's time is over
"""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from weakref import WeakValueDictionary


class _Watch:
    """Ends the waits of one event loop that take too long."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._limits: set[TimeLimit] = set()
        self._looks_at = math.inf  # the timer that is set for then counts, and no earlier one

    def add(self, limit: TimeLimit) -> None:
        """Watch a limit until it is removed."""
        self._limits.add(limit)
        self._look_by(limit.due)

    def remove(self, limit: TimeLimit) -> None:
        """Watch a limit no longer. Idempotent."""
        self._limits.discard(limit)

    def _look_by(self, due: float) -> None:
        if due < self._looks_at:
            self._looks_at = due
            self.loop.call_at(due, self._look, due)

    def _look(self, set_for: float) -> None:
        """End what is due. O(limits), but seconds lie between two looks: until what was due first is over."""
        if set_for != self._looks_at:
            return
        self._looks_at = math.inf
        now = self.loop.time()
        for limit in [limit for limit in self._limits if limit.due <= now or not limit.is_waiting]:
            self._limits.remove(limit)
            limit.fire()
        self._look_by(min((limit.due for limit in self._limits), default=math.inf))


_watches: WeakValueDictionary[int, _Watch] = WeakValueDictionary()
"""By the id of the event loop. Limits and timers keep them alive."""


def _watch_of(loop: asyncio.AbstractEventLoop) -> _Watch:
    watch = _watches.get(id(loop))
    if watch is None or watch.loop is not loop:  # an id may have been another's
        watch = _watches[id(loop)] = _Watch(loop)
    return watch


class TimeLimit:
    """Ends a wait inside `with limit` that takes too long, with TimeoutError. `close` it when no wait follows.

    All waits are one task's, that of the first.
    """

    __slots__ = (
        "__weakref__",
        "_at",
        "_has_fired",
        "_is_watched",
        "_num_cancelling",
        "_seconds",
        "_task",
        "_watch",
        "due",
        "is_waiting",
    )

    def __init__(self, seconds: float = math.inf, *, at: float = math.inf) -> None:
        """Each wait may take `seconds`, and none may go on beyond `at` by the event loop's clock."""
        self._seconds, self._at = seconds, at
        self._watch = _watch_of(asyncio.get_running_loop())
        self._is_watched = False
        self.is_waiting = False
        self.due = at
        """The event loop's clock at which the present wait, or the last one, has taken too long."""
        self._task: asyncio.Task[object] | None = None
        self._num_cancelling = 0
        self._has_fired = False

    def __enter__(self) -> None:
        """Begin a wait."""
        task = self._task
        if task is None:
            task = self._task = asyncio.current_task()
            assert task is not None
        self.is_waiting, self._num_cancelling = True, task.cancelling()
        if self._seconds < math.inf:
            self.due = min(self._watch.loop.time() + self._seconds, self._at)
        if not self._is_watched:
            self._is_watched = True
            self._watch.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the wait. Raises TimeoutError when it took too long, unless its task is to end anyway."""
        self.is_waiting = False
        if self._has_fired:
            self._has_fired = False
            assert self._task is not None
            if self._task.uncancel() <= self._num_cancelling and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def fire(self) -> None:
        """End the present wait if there is one: its time is over. The next wait is watched anew."""
        self._is_watched = False
        if self.is_waiting and self._task is not None:
            self._has_fired = True
            self._task.cancel()

    def close(self) -> None:
        """Watch no longer. Idempotent."""
        if self._is_watched:
            self._is_watched = False
            self._watch.remove(self)
