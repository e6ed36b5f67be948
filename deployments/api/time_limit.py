"""A time limit for code that waits for every token.

`asyncio.timeout` sets and cancels a timer for each wait. A `TimeLimit` is used for many: it lets its timer run,
and looks when it fires whether the present wait has taken too long.

    waits      ├──┤ ├─┤ ├──┤      ├───────────────── TimeoutError
    timer      └────────────▶ looks, and again when the present wait's time is over
"""

from __future__ import annotations

import asyncio
import math
from types import TracebackType


class TimeLimit:
    """Ends a wait inside `with limit` that takes too long, with TimeoutError. `close` it when no wait follows.

    All waits are one task's, that of the first.
    """

    def __init__(self, seconds: float = math.inf, *, at: float = math.inf) -> None:
        """Each wait may take `seconds`, and none may go on beyond `at` by the event loop's clock."""
        self._seconds, self._at = seconds, at
        self._loop = asyncio.get_running_loop()
        self._is_waiting = False
        self._due = at  # of the present wait, or the last one
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._num_cancelling = 0
        self._has_fired = False

    def __enter__(self) -> None:
        """Begin a wait."""
        if self._task is None:
            self._task = asyncio.current_task()
            assert self._task is not None
        self._is_waiting, self._num_cancelling = True, self._task.cancelling()
        if self._seconds < math.inf:
            self._due = min(self._loop.time() + self._seconds, self._at)
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._look)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the wait. Raises TimeoutError when it took too long, unless its task is to end anyway."""
        self._is_waiting = False
        if self._has_fired:
            self._has_fired = False
            assert self._task is not None
            if self._task.uncancel() <= self._num_cancelling and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if not self._is_waiting or self._task is None:  # the next wait sets a timer
            return
        if self._loop.time() < self._due:
            self._timer = self._loop.call_at(self._due, self._look)
            return
        self._has_fired = True
        self._task.cancel()
