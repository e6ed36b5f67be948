"""The queue of requests that wait for an engine: deficit round robin over tenants, in computed tokens.

    tenant a  [ 9k | 2k | 2k | ... ]   credit  -500      a turn sends requests while there is credit
    tenant b  [ 1k ]                   credit  1100      (engine/tenants/round_robin.py)
    tenant c  [ 30k | 30k ]            credit -27k

A request is charged when it is sent, and the charge is corrected (`charge`) once its computed tokens are known.
While two tenants both wait, their tokens sent, each divided by its weight, differ by at most one quantum and one
request of each.

The module needs neither clock nor asyncio. Within a tenant, the lowest priority goes first, then the
earliest arrival.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, KeysView, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from deployments.config.settings import AdmissionSettings
from engine.tenants.round_robin import DeficitRoundRobin

T = TypeVar("T")


class AdmissionQueueFull(Exception):
    """There is no room for another request of this tenant ("tenant") or of any ("all")."""

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
    """Number of tokens that the request will compute, at least 1."""
    priority: int = 0


@dataclass(slots=True)
class _PriorityLevel(Generic[T]):
    """A tenant's requests of one priority, in order of arrival."""

    entries: OrderedDict[Waiting[T], None] = field(default_factory=OrderedDict)
    tokens: int = 0


@dataclass(eq=False, slots=True)
class _TenantQueue(Generic[T]):
    """One tenant's requests."""

    levels: dict[int, _PriorityLevel[T]] = field(default_factory=dict)
    num_waiting: int = 0
    tokens: int = 0

    def put(self, entry: Waiting[T]) -> None:
        level = self.levels.setdefault(entry.priority, _PriorityLevel())
        level.entries[entry] = None
        self._count(level, 1, entry.cost)

    def first(self) -> Waiting[T]:
        """Return the tenant's next request."""
        return next(iter(self.levels[min(self.levels)].entries))

    def remove(self, entry: Waiting[T]) -> None:
        """Remove a request. Raises KeyError when it does not wait here."""
        level = self.levels[entry.priority]
        del level.entries[entry]
        self._count(level, -1, -entry.cost)
        if not level.entries:
            del self.levels[entry.priority]

    def _count(self, level: _PriorityLevel[T], requests: int, tokens: int) -> None:
        level.tokens += tokens
        self.num_waiting += requests
        self.tokens += tokens


class FairQueue(Generic[T]):
    """The queue of all tenants' requests. Belongs to one thread."""

    def __init__(self, weights: Mapping[str, float], settings: AdmissionSettings | None = None) -> None:
        """Unknown tenants weigh 1. `settings` bounds the queue, and says how many tokens a turn is worth."""
        self._settings = settings or AdmissionSettings()
        self._turns = DeficitRoundRobin(self._settings.quantum_tokens, weights)
        self._queues: dict[str, _TenantQueue[T]] = {}  # queues of tenants with requests
        self.num_waiting = 0
        self.num_tokens = 0
        """Number of tokens that all waiting requests will compute."""

    def take_over(self, weights: Mapping[str, float], settings: AdmissionSettings) -> None:
        """Use other weights and settings from now on; waiting requests keep waiting."""
        self._settings = settings
        self._turns.weigh(settings.quantum_tokens, weights)

    @property
    def tenants(self) -> KeysView[str]:
        """The tenants whose requests wait."""
        return self._queues.keys()

    @property
    def num_turns(self) -> int:
        """Number of turns given since the start."""
        return self._turns.num_turns

    def push(self, entry: Waiting[T]) -> None:
        """Add a request. Raises AdmissionQueueFull when there is no room."""
        self._check_room(entry)
        if entry.tenant not in self._queues:
            self._queues[entry.tenant] = _TenantQueue()
            self._turns.join(entry.tenant)
        self._queues[entry.tenant].put(entry)
        self.num_waiting += 1
        self.num_tokens += entry.cost

    def pop(self, among: Container[str] | None = None) -> Waiting[T] | None:
        """Remove, charge and return the next request, of tenants in `among` or all; None if there is none."""
        tenant = self._turns.turn(among)
        if tenant is None:
            return None
        entry = self._queues[tenant].first()
        self._turns.charge(tenant, entry.cost)
        self.remove(entry)
        return entry

    def remove(self, entry: Waiting[T]) -> None:
        """Remove a request. Raises KeyError when it does not wait."""
        queue = self._queues[entry.tenant]
        queue.remove(entry)
        self.num_waiting -= 1
        self.num_tokens -= entry.cost
        if not queue.num_waiting:
            del self._queues[entry.tenant]
            self._turns.leave(entry.tenant)

    def charge(self, tenant: str, tokens: float) -> None:
        """Charge a tenant for tokens computed beyond those charged by `pop`; a negative number is a refund."""
        self._turns.charge(tenant, tokens)

    def tokens_before(self, tenant: str, cost: int, priority: int = 0) -> float:
        """Return the tokens that would be sent before a new request of `cost`, given its tenant's share."""
        own = 0
        if tenant in self._queues:
            levels = self._queues[tenant].levels
            own = sum(level.tokens for rank, level in levels.items() if rank <= priority)
        weight = self._turns.weight(tenant)
        before = float(own)
        for name, queue in self._queues.items():
            if name != tenant:
                before += min(queue.tokens, (own + cost) * self._turns.weight(name) / weight)
        return before

    def waiting_of(self, tenant: str) -> int:
        """Return the number of a tenant's requests that wait."""
        return self._queues[tenant].num_waiting if tenant in self._queues else 0

    def _check_room(self, entry: Waiting[T]) -> None:
        """Raise AdmissionQueueFull if a limit is reached; a tenant without waiting requests is never refused."""
        bounds, queue = self._settings, self._queues.get(entry.tenant)
        if queue is None:
            return
        bounded: tuple[tuple[Literal["tenant", "all"], int, int, str, str], ...] = (
            ("tenant", queue.num_waiting, 1, "of your requests", "max_waiting_per_tenant"),
            ("tenant", queue.tokens, entry.cost, "of your prompt tokens", "max_waiting_tokens_per_tenant"),
            ("all", self.num_waiting, 1, "requests", "max_waiting"),
            ("all", self.num_tokens, entry.cost, "prompt tokens", "max_waiting_tokens"),
        )
        for whose, waiting, more, what, setting in bounded:
            most = getattr(bounds, setting)
            if waiting + more > most:
                # The size of the queue would reveal others' requests, or the cached part of a prompt.
                reason = f"as many {what} are waiting as may, {most} (admission.{setting})"
                raise AdmissionQueueFull(whose, reason)
