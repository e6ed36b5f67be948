"""The seam between the scheduler and whatever guesses a request's next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.request import Request


class Drafter(Protocol):
    """Guesses tokens. It may be wrong, late or silent: nothing but speed depends on it."""

    def propose(self, requests: Sequence[Request], max_tokens: Sequence[int]) -> list[Sequence[int]]:
        """For each request, up to `max_tokens` (one number each, at least 1) tokens that may follow its last one.

        All of the requests' tokens are known, and they only ever grew since the last call. An empty guess is
        always allowed; a guess holds only ids of the model's vocabulary. Never raises for want of memory.
        """
        ...

    def forget(self, request: Request) -> None:
        """The request gave its pages back: it ended or was preempted. Whatever is kept for it is let go."""
        ...
