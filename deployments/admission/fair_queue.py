"""Requests that wait for an engine, and whose turn it is: deficit round robin over tenants, in computed tokens.

    tenant a  [ 9k | 2k | 2k | ... ]   credit  -500      a turn sends requests while there is credit
    tenant b  [ 1k ]                   credit  1100      (engine/scheduling/round_robin.py)
    tenant c  [ 30k | 30k ]            credit -27k

A request is charged when it is sent, and corrected (`charge`) when it is known what it really computed. While two
tenants both wait, what they were sent, each divided by its weight, differs by at most one quantum and one request
of each.

Pure: no clock, no asyncio. Within a tenant a higher priority goes first, then whoever came first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from engine.scheduling.round_robin import DeficitRoundRobin

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """How much may wait. One request of each tenant always may, of any size."""

    max_requests: int = 4096
    max_tokens: int = 16_000_000
    max_requests_per_tenant: int = 1024
    max_tokens_per_tenant: int = 4_000_000


class QueueFull(Exception):
    """No room for another request: of this tenant ("tenant") or of anybody ("all")."""

    def __init__(self, whose: Literal["tenant", "all"], reason: str) -> None:
        super().__init__(reason)
        self.whose = whose
        self.reason = reason


@dataclass(eq=False, slots=True)
class Waiting(Generic[T]):
    """A request in the queue."""

    item: T
    tenant: str
    cost: int
    """Tokens it will compute, at least 1."""
    priority: int = 0


@dataclass(slots=True)
class _Level(Generic[T]):
    """A tenant's requests of one priority, in order of arrival."""

    entries: OrderedDict[Waiting[T], None] = field(default_factory=OrderedDict)
    tokens: int = 0


@dataclass(eq=False, slots=True)
class _Line(Generic[T]):
    """One tenant's requests."""

    levels: dict[int, _Level[T]] = field(default_factory=dict)
    num_waiting: int = 0
    tokens: int = 0

    def put(self, entry: Waiting[T]) -> None:
        level = self.levels.setdefault(entry.priority, _Level())
        level.entries[entry] = None
        self._count(level, 1, entry.cost)

    def first(self) -> Waiting[T]:
        """Its next request."""
        return next(iter(self.levels[max(self.levels)].entries))

    def remove(self, entry: Waiting[T]) -> None:
        """Raises KeyError when it is not here."""
        level = self.levels[entry.priority]
        del level.entries[entry]
        self._count(level, -1, -entry.cost)
        if not level.entries:
            del self.levels[entry.priority]

    def _count(self, level: _Level[T], requests: int, tokens: int) -> None:
        level.tokens += tokens
        self.num_waiting += requests
        self.tokens += tokens


class FairQueue(Generic[T]):
    """The queue. Belongs to one thread."""

    def __init__(
        self, weights: Mapping[str, float], quantum: int = 2048, bounds: QueueBounds | None = None
    ) -> None:
        """`quantum` is what the tenant of the least weight gets per turn, in tokens; unknown tenants weigh 1."""
        self._turns = DeficitRoundRobin(quantum, weights)
        self._bounds = bounds or QueueBounds()
        self._lines: dict[str, _Line[T]] = {}  # of tenants with requests
        self.num_waiting = 0
        self.num_tokens = 0
        """Tokens that all waiting requests will compute."""

    @property
    def num_turns(self) -> int:
        """Turns given since the start."""
        return self._turns.num_turns

    def push(self, entry: Waiting[T]) -> None:
        """Add a request. Raises QueueFull."""
        self._check_room(entry)
        if entry.tenant not in self._lines:
            self._lines[entry.tenant] = _Line()
            self._turns.join(entry.tenant)
        self._lines[entry.tenant].put(entry)
        self.num_waiting += 1
        self.num_tokens += entry.cost

    def pop(self) -> Waiting[T] | None:
        """The next request to send, charged to its tenant; None when nobody waits."""
        tenant = self._turns.turn()
        if tenant is None:
            return None
        entry = self._lines[tenant].first()
        self._turns.charge(tenant, entry.cost)
        self.remove(entry)
        return entry

    def remove(self, entry: Waiting[T]) -> None:
        """Take out a request that waits. Raises KeyError when it does not."""
        line = self._lines[entry.tenant]
        line.remove(entry)
        self.num_waiting -= 1
        self.num_tokens -= entry.cost
        if not line.num_waiting:
            del self._lines[entry.tenant]
            self._turns.leave(entry.tenant)

    def charge(self, tenant: str, tokens: float) -> None:
        """A request computed so much more (or less) than it was charged for when it was popped."""
        self._turns.charge(tenant, tokens)

    def tokens_before(self, tenant: str, cost: int, priority: int = 0) -> float:
        """Tokens that would be sent before a request of `cost` that came now, its tenant's share considered."""
        own = 0
        if tenant in self._lines:
            levels = self._lines[tenant].levels
            own = sum(level.tokens for rank, level in levels.items() if rank >= priority)
        weight = self._turns.weight(tenant)
        before = float(own)
        for name, line in self._lines.items():
            if name != tenant:
                before += min(line.tokens, (own + cost) * self._turns.weight(name) / weight)
        return before

    def waiting_of(self, tenant: str) -> int:
        """Requests of a tenant that wait."""
        return self._lines[tenant].num_waiting if tenant in self._lines else 0

    def _check_room(self, entry: Waiting[T]) -> None:
        """A tenant that has nothing waiting is never kept out, however much others have."""
        bounds, line = self._bounds, self._lines.get(entry.tenant)
        if line is None:
            return
        if line.num_waiting >= bounds.max_requests_per_tenant:
            raise QueueFull("tenant", f"{line.num_waiting} of your requests are waiting, the limit")
        if line.tokens + entry.cost > bounds.max_tokens_per_tenant:
            limit = f"the limit is {bounds.max_tokens_per_tenant}"
            raise QueueFull("tenant", f"{line.tokens} of your prompt tokens are waiting, {limit}")
        if self.num_waiting >= bounds.max_requests:
            raise QueueFull("all", f"{self.num_waiting} requests are waiting, the limit")
        if self.num_tokens + entry.cost > bounds.max_tokens:
            raise QueueFull(
                "all", f"{self.num_tokens} prompt tokens are waiting, the limit is {bounds.max_tokens}"
            )
