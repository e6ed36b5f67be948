"""A clock that stands still while its process does.

A process that is paused (a frozen container, a swapping host, SIGSTOP) hears nobody. When it goes on, it finds all
of that time over, and what its peers sent meanwhile unread. So a peer's time is measured by this clock:

    monotonic   ─0──1──2────────── paused ──────────10──11─
    awake       ─0──1──2──2.5─────────────────────── 2.5──3.5─
"""

from __future__ import annotations

from collections.abc import Callable

STILL_S = 0.5
"""Most seconds between two readings that count: who reads the clock later has not looked for messages either."""


class AwakeClock:
    """Counts the seconds in which its owner could hear its peers. To be read several times in `STILL_S`."""

    def __init__(self, clock: Callable[[], float]) -> None:
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
