"""The sums of waiting and rejected work in an ingress that the autoscaler receives.

Where replicas have roles (`router/fetch/roles.py`), each side receives its own work: prefill replicas the prompts
that go apart; decode replicas the tokens of all others, and every request, because each ends there.
"""

from __future__ import annotations

from dataclasses import dataclass

from deployments.wire.messages import Backlog


@dataclass(slots=True)
class _Sum:
    requests: int = 0
    tokens: int = 0
    turned_away: int = 0
    turned_away_tokens: int = 0


class WaitingWork:
    """Sums over the requests of one model in one ingress. `cost` is a request's uncached prompt tokens."""

    def __init__(self) -> None:
        self._apart, self._others = _Sum(), _Sum()

    def add(self, cost: int, *, is_apart: bool) -> None:
        """Note that a request waits."""
        of = self._of(is_apart)
        of.requests, of.tokens = of.requests + 1, of.tokens + cost

    def remove(self, cost: int, *, is_apart: bool) -> None:
        """Note that a request no longer waits."""
        of = self._of(is_apart)
        of.requests, of.tokens = of.requests - 1, of.tokens - cost

    def turn_away(self, cost: int, *, is_apart: bool) -> None:
        """Note that a request left without an engine."""
        of = self._of(is_apart)
        of.turned_away, of.turned_away_tokens = of.turned_away + 1, of.turned_away_tokens + cost

    def backlog(self, role: str = "") -> Backlog:
        """Return the report for the replicas of a role; "": for a fleet without roles."""
        apart, others = self._apart, self._others
        if role == "prefill":
            return Backlog(apart.requests, apart.tokens, apart.turned_away, apart.turned_away_tokens)
        requests, turned_away = apart.requests + others.requests, apart.turned_away + others.turned_away
        if role == "decode":
            return Backlog(requests, others.tokens, turned_away, others.turned_away_tokens)
        turned_away_tokens = apart.turned_away_tokens + others.turned_away_tokens
        return Backlog(requests, apart.tokens + others.tokens, turned_away, turned_away_tokens)

    def _of(self, is_apart: bool) -> _Sum:
        return self._apart if is_apart else self._others
