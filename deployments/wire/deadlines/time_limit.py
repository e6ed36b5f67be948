"""Time limits for code that waits for a peer as often as once per token.

`asyncio.timeout` sets and cancels a timer for each wait, and counts the time in which this process was suspended.
A `TimeLimit` is one deadline for many waits, which is checked when the first of them may be over; `timeout` is for
one wait.

    waits      ├──┤ ├─┤ ├──┤      ├───────────────── TimeoutError
    deadline   └────────────▶ looks, and again when the next wait's time is over
"""

from __future__ import annotations

import asyncio
import math
from types import TracebackType

from deployments.wire.deadlines.deadline import watch_of


class TimeLimit:
    """Ends a wait inside `with limit` that takes too long, with TimeoutError. `close` it when no wait follows.

    All waits belong to one task, that of the first.
    """

    __slots__ = (
        "__weakref__",
        "_ends_at",
        "_has_fired",
        "_is_watched",
        "_num_cancelling",
        "_seconds",
        "_task",
        "_watch",
        "due",
        "is_waiting",
    )

    def __init__(self, seconds: float = math.inf, *, total_s: float = math.inf) -> None:
        """Each wait may take `seconds`, and no wait may continue after `total_s`."""
        self._watch = watch_of(asyncio.get_running_loop())
        self._seconds, self._ends_at = seconds, self._watch.now() + total_s
        self._is_watched = False
        self.is_waiting = False
        self.due = self._ends_at
        """Awake time of the event loop at which the present wait, or the last one, has taken too long."""
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
            self.due = min(self._watch.now() + self._seconds, self._ends_at)
        if not self._is_watched:
            self._is_watched = True
            self._watch.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the wait. Raises TimeoutError if it took too long, unless its task is being cancelled anyway."""
        self.is_waiting = False
        if self._has_fired:
            self._has_fired = False
            assert self._task is not None
            if self._task.uncancel() <= self._num_cancelling and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def fire(self) -> None:
        """End the present wait if there is one: its time is over. The next wait is watched again."""
        self._is_watched = False
        if self.is_waiting and self._task is not None:
            self._has_fired = True
            self._task.cancel()

    def close(self) -> None:
        """Stop watching, and release a task that does not wait. Idempotent."""
        if not self.is_waiting:
            self._task = None
        if self._is_watched:
            self._is_watched = False
            self._watch.remove(self)


class _OneWait(TimeLimit):
    """A limit for one wait."""

    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the wait, and stop watching. Raises TimeoutError if it took too long."""
        try:
            super().__exit__(kind, error, traceback)
        finally:
            self.close()


def timeout(seconds: float) -> TimeLimit:
    """Return a limit for one wait, `with timeout(seconds): ...`, which need not be closed."""
    return _OneWait(seconds)
