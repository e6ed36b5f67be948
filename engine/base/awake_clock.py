"""A clock that stands still while its process does.

A paused process (a frozen container, a swapping host, SIGSTOP) receives nothing. When it resumes, all of that time
is over, and the messages of its peers are unread. So the time that a peer has is measured by this clock:

    monotonic   ─0──1──2────────── paused ──────────10──11─
    awake       ─0──1──2──2.5─────────────────────── 2.5──3.5─

That time is over only after its owner has looked once more for messages. A loop reads the clock, looks, and then
decides by that reading; `Patience` does it for code that waits for one message.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STILL_S = 0.5
"""Most seconds between two readings that count: a later reader has not looked for messages either."""
LOOK_S = STILL_S / 5
"""Most seconds of a single wait in code that measures time by such a clock."""


class AwakeClock:
    """Counts the seconds in which its owner could hear its peers. Read it several times in `STILL_S`, from one
    thread at a time.
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
    """The time that a peer has for one message, for code that looks for it repeatedly:

    while not (found := look(LOOK_S)) and not patience.is_over(): ...
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is monotonic."""
        self._awake = AwakeClock(clock)
        self._until = self._awake.now() + seconds
        self._is_due = False

    def is_over(self) -> bool:
        """Return whether the time was over at the previous call; its owner has looked since."""
        was_due, self._is_due = self._is_due, self._awake.now() >= self._until
        return was_due
