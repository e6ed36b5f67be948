"""An awake clock for code that seldom reads the time: its event loop reads it meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from engine.base.awake_clock import LOOK_S, AwakeClock


class SteadyClock:
    """Counts the seconds in which an event loop could receive from peers, starting with its first reading."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is monotonic."""
        self._awake = AwakeClock(clock)
        self.born = self._awake.now()
        """Value of the clock when it was made."""
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Read the clock, on the event loop that it belongs to."""
        if self._timer is None:
            self._read(asyncio.get_running_loop())
        return self._awake.now()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        self._awake.now()
        self._timer = loop.call_later(LOOK_S, self._read, loop)
