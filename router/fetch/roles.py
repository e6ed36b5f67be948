"""Prefill and decode apart: the replicas that a prompt may go to where replicas have roles.

    a prompt of which little is cached on decode replicas ───▶ "prefill": computes it, sends the first token
                                                                  │ the KV is sent too
    any other prompt, and the rest of that stream ───────────▶ "decode" ◀──┘

Where one side has no replica that can serve, the other one does both: service comes before roles.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

from router.fleet import Fleet
from router.overlap import Overlap

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = get_args(Role)
WORTH_S = 0.25
"""Seconds of prefill, at the fleet's measured rate, above which a prompt goes apart if no number of tokens is set:
so long a prefill is worth a transfer, and would hold back the streams next to it."""


class Pools:
    """Chooses the pool of replicas for each prompt of one deployment."""

    def __init__(self, fleet: Fleet, above_tokens: int | None) -> None:
        """Prompts with more uncached tokens go to prefill replicas; None: those that take `WORTH_S` go there."""
        self._fleet, self._above_tokens = fleet, above_tokens

    def choose(
        self,
        candidates: Collection[str],
        avoid: Collection[str],
        num_tokens: int,
        overlap: Overlap,
        is_resumed: bool,
    ) -> tuple[Collection[str], bool]:
        """Return those of the candidates among which a prompt of `num_tokens` is placed, and whether the stream
        moves to another replica after its first token.
        """
        prefill, decode = self._serving("prefill", candidates, avoid), self._serving("decode", candidates, avoid)
        if not decode:
            return candidates, False
        if is_resumed or not prefill:
            return decode, False
        is_apart = self.is_apart(num_tokens - overlap.most_among(decode))
        return (prefill, True) if is_apart else (decode, False)

    def is_apart(self, num_uncached: int) -> bool:
        """Whether a prompt with so many tokens to compute goes apart, where both sides serve."""
        above = self._fleet.prefill_rate() * WORTH_S if self._above_tokens is None else self._above_tokens
        return num_uncached > above

    def _serving(self, role: Role, candidates: Collection[str], avoid: Collection[str]) -> Collection[str]:
        """Return the candidates of a role, if any of them can serve now."""
        pool = self._fleet.with_role(role).intersection(candidates)
        return pool if pool and not self._fleet.candidates(pool, avoid).none_available else ()
