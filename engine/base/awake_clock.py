"""A clock that stands still while its process does.

A process that is paused (a frozen container, a swapping host, SIGSTOP) hears nobody. When it goes on, it finds all
of that time over, and what its peers sent meanwhile unread. So a peer's time is measured by this clock:

    monotonic   ─0──1──2────────── paused ──────────10──11─
    awake       ─0──1──2──2.5─────────────────────── 2.5──3.5─

And it is over only when its owner has looked once more for what arrived. A loop reads the clock, looks, and then
judges by that reading; `Patience` does it for code that waits for one thing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STILL_S = 0.5
"""Most seconds between two readings that count: who reads the clock later has not looked for messages either."""
LOOK_S = STILL_S / 5
"""Most seconds for which code should wait at once that measures time by such a clock."""


class AwakeClock:
    """Counts the seconds in which its owner could hear its peers. To be read several times in `STILL_S`.

    For one thread at a time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is monotonic."""
        self._clock = clock
        self._read_at = clock()
        self._stood_still_s = 0.0

    def now(self) -> float:
        """Read the clock."""
        now = self._clock()
        gap = now - self._read_at
        if gap > STILL_S:
            self._stood_still_s += gap - STILL_S
        self._read_at = now
        return now - self._stood_still_s


class Patience:
    """The time that a peer has for one thing, for code that looks for it again and again:

    while not (found := look(LOOK_S)) and not patience.is_over(): ...
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is monotonic."""
        self._awake = AwakeClock(clock)
        self._until = self._awake.now() + seconds
        self._is_due = False

    def is_over(self) -> bool:
        """Return whether the time was over when this was asked before: its owner has looked since."""
        was_due, self._is_due = self._is_due, self._awake.now() >= self._until
        return was_due
