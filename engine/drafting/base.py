"""The protocol between the scheduler and the drafters, which propose a request's next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.values.request import Request


class Drafter(Protocol):
    """Proposes draft tokens. It may be wrong, late or silent: only speed depends on it."""

    @property
    def has_begun(self) -> bool:
        """Whether it drafts for the next step on the device, behind the last planned one."""

    def propose(self, requests: Sequence[Request], max_tokens: Sequence[int]) -> list[Sequence[int]]:
        """Propose for each request up to `max_tokens` (one number each, at least 1) tokens to follow its last one.

        All of the requests' tokens are known, no step computes any of them meanwhile, and the requests have only
        grown since the last call. An empty draft is always allowed; drafts hold only ids of the model's
        vocabulary, or are `PENDING` if only the device has them. Never raises for lack of memory.
        """

    def forget(self, request: Request) -> None:
        """Release the state of a request that gave its pages back because it ended or was preempted."""
