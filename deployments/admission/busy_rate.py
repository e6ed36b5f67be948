"""The rate of work: amounts done per second of busy time."""

from __future__ import annotations

from collections import deque

MIN_BUSY_S = 0.2
"""Fewest busy seconds for which a rate is computed."""


class BusyRate:
    """Measures the rate over the last `window_s` busy seconds. Time is an argument."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._busy_s = 0.0
        self._since: float | None = None
        self._total = 0.0
        self._marks: deque[tuple[float, float]] = deque([(0.0, 0.0)])  # (busy seconds, total before)

    def set_busy(self, is_busy: bool, now: float) -> None:
        """Set whether there is work from `now` on."""
        self._advance(now)
        self._since = now if is_busy else None

    def add(self, amount: float, now: float) -> None:
        """Add an amount that was done by `now`."""
        self._advance(now)
        self._total += amount
        # A few marks a second are enough.
        if self._busy_s - self._marks[-1][0] >= self._window_s / 100:
            self._marks.append((self._busy_s, self._total))
        while len(self._marks) > 2 and self._busy_s - self._marks[1][0] >= self._window_s:
            self._marks.popleft()

    def rate(self, now: float) -> float | None:
        """Return the amount per busy second; None until it is measured."""
        self._advance(now)
        began, before = self._marks[0]
        busy, done = self._busy_s - began, self._total - before
        return done / busy if busy >= MIN_BUSY_S and done > 0 else None

    def _advance(self, now: float) -> None:
        if self._since is not None:
            self._busy_s += max(0.0, now - self._since)
            self._since = now
