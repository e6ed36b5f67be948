"""Divides an engine among tenants at every step: its rows, its pages, and the time of a step.

A single tenant may have all rows of the batch and all pages. When another waits, the tenant with most rows gives
some back, but keeps at least as many as the other then has, so that no row goes back and forth. In a step, each
tenant has as many rows as the one that wants fewest, and more if that makes the step only a little longer. For
some seconds after tenants shared it, steps stay brief, because a new request waits for the step in flight.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from engine.values.request import Request

MOST_TENANTS = 8
"""Tenants whose numbers of requests are reported. Each other tenant has at most as many as the least of these."""
_REMEMBERED_S = 5.0
"""Seconds for which steps stay brief after tenants shared the engine, those of batches after another request."""


class Sharers:
    """Counts an engine's requests by tenant, and its deferrable ones separately."""

    def __init__(self) -> None:
        self._num_requests = Counter[str]()
        self._several_at = self._urgent_at = -math.inf

    @property
    def are_several(self) -> bool:
        """Whether there is anything to share. O(1)."""
        return len(self._num_requests) > 1

    def were_several(self, now: float) -> bool:
        """Whether there is, or was some seconds ago. O(1)."""
        if self.are_several:
            self._several_at = now
        return now - self._several_at < _REMEMBERED_S

    def were_urgent(self, now: float) -> bool:
        """Whether there are requests that are not deferrable, or were some seconds ago. O(1)."""
        if self._num_requests:
            self._urgent_at = now
        return now - self._urgent_at < _REMEMBERED_S

    def to_leave_room(self, now: float) -> str | None:
        """Return the tenant with most requests, if others have some or had some seconds ago. O(tenants)."""
        if not self.were_several(now):
            return None
        return max(self._num_requests, key=self._num_requests.__getitem__, default=None)

    def largest(self) -> dict[str, int]:
        """Return the number of requests of each of the `MOST_TENANTS` tenants with the most."""
        return dict(self._num_requests.most_common(MOST_TENANTS))

    def add(self, request: Request) -> None:
        """Count a request that has arrived."""
        if not request.is_deferrable:
            self._num_requests[request.tenant] += 1

    def remove(self, request: Request) -> None:
        """Stop counting a request that has ended."""
        if not request.is_deferrable:
            self._num_requests[request.tenant] -= 1
            if not self._num_requests[request.tenant]:
                del self._num_requests[request.tenant]


def to_give_way(running: Sequence[Request], waiting: Iterable[Request]) -> tuple[Request, list[Request]] | None:
    """Return the waiting request of the tenant with fewest rows, and the requests of the tenant with most rows
    that may be preempted for it, in order of precedence; None where all have their shares. O(running + waiting).

    No request is preempted for a less urgent one. Deferrable ones take no part, because all others preempt them.
    """
    rows = Counter[str]()
    for request in running:
        if not request.is_deferrable:
            rows[request.tenant] += request.width
    urgent = [request for request in waiting if not request.is_deferrable]
    if not rows or not urgent:
        return None
    first = min(urgent, key=lambda request: (rows[request.tenant], request.queue_position))
    most = max(rows, key=lambda tenant: rows[tenant])
    spare = rows[most] - rows[first.tenant] - first.width
    victims: list[Request] = []
    for request in reversed(running):
        is_less_urgent = request.queue_position.preemption_level <= first.queue_position.preemption_level
        if request.tenant == most and not request.is_deferrable and is_less_urgent and request.width <= spare:
            victims.append(request)
            spare -= request.width
    return (first, victims[::-1]) if victims else None


def within_shares(
    decodes: Sequence[Request], others: Iterable[Request], num_steps: int
) -> tuple[list[Request], list[Request]] | None:
    """Divide decoding requests into as many of each tenant as the one with fewest has, and the rest; None if one
    tenant has all.

    `others` are requests of tenants that wait for other things. The requests of a tenant take turns from step to
    step. O(decodes + others).
    """
    by_tenant: defaultdict[str, list[Request]] = defaultdict(list)
    for request in decodes:
        by_tenant[request.tenant].append(request)
    num_wanted = Counter({tenant: len(requests) for tenant, requests in by_tenant.items()})
    num_wanted.update(request.tenant for request in others if not request.is_deferrable)
    if len(num_wanted) < 2:
        return None
    share = min(num_wanted.values())
    within: list[Request] = []
    beyond: list[Request] = []
    for requests in by_tenant.values():
        requests = in_turn(requests, len(requests), num_steps * share)
        within += requests[:share]
        beyond += requests[share:]
    return within, beyond


def in_turn(requests: list[Request], count: int, first: int) -> list[Request]:
    """Return `count` requests from the one at `first` on, and after the last from the beginning."""
    first %= max(1, len(requests))
    return (requests[first:] + requests[:first])[:count]
