"""The hub's roster of ingresses that take requests, as each of them reports at each beat (`calls.py`).

Tenants' limits are divided by their number (`deployments/ingress/roll_call.py`).
"""

from __future__ import annotations

ABSENT_S = 5.0
"""Seconds of silence after which an ingress does not count: it died, or is cut off."""
MAX_INGRESSES = 4096
"""Ingresses that are remembered; of more, the one that was heard of first is dropped."""


class Roster:
    """The present members. `now` is in seconds, on one clock, which should stand still while the hub does."""

    def __init__(self, born: float) -> None:
        """`born` is now, at the hub's start."""
        self._complete_at = born + ABSENT_S
        self._heard: dict[str, float] = {}  # ingress -> time, the longest silent first

    def here(self, ingress: str, now: float) -> int | None:
        """Note that an ingress is here. Return how many are; None while the hub is too new to know."""
        self.leave(ingress)
        self._heard[ingress] = now
        while len(self._heard) > MAX_INGRESSES or now - self._heard[self._longest_silent()] > ABSENT_S:
            del self._heard[self._longest_silent()]
        return len(self._heard) if now >= self._complete_at else None

    def leave(self, ingress: str) -> None:
        """Note that an ingress takes no more requests. It may be unknown."""
        self._heard.pop(ingress, None)

    def _longest_silent(self) -> str:
        return next(iter(self._heard))
