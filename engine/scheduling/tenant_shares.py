"""Which running requests of one tenant give their places to a waiting one of another.

A tenant alone may have all rows of the batch and all pages. When another waits, the tenant with most rows gives
some back, as long as it keeps at least as many as the other then has: no place is taken back and forth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.request import Request


def to_give_way(running: Sequence[Request], waiting: Iterable[Request]) -> tuple[Request, list[Request]] | None:
    """Return the waiting request of the tenant with fewest rows, and those of the tenant with most that may be
    preempted for it, in order of precedence; None where all have their shares. O(running + waiting).

    No request gives way to a less urgent one, and deferrable ones take no part: they give way to all others.
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
