"""Requests that wait for an engine, and whose turn it is: deficit round robin over tenants, in computed tokens.

    tenant a  [ 9k | 2k | 2k | ... ]   credit  -500 ──┐   a turn: credit += quantum * weight; send while credit > 0
    tenant b  [ 1k ]                   credit  1100   │   what is sent beyond the credit is a debt of later turns
    tenant c  [ 30k | 30k ]            credit -27k  ◀─┘

M. Shreedhar, G. Varghese, "Efficient Fair Queueing using Deficit Round Robin", 1995; with debts instead of saved
credit, as what a request really computed is known only after it was sent (`charge` corrects it).

- While two tenants both wait, what they were sent, each divided by its weight, differs by at most one quantum and
  one request of each.
- A tenant that waits for nothing saves nothing: it comes back with no credit. Its debt shrinks by the turns it did
  not take, and is gone when nobody waits any more.
- A tenant that comes back without debt, and has taken no turn for a round, goes first (as in FQ-CoDel, RFC 8290):
  who asks for less than its share hardly waits.
- A turn sends a request or pays a quantum of debt: n requests of t tokens take at most n + t / quantum turns.

Pure: no clock, no asyncio. Within a tenant a higher priority goes first, then whoever came first.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

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
class _Account(Generic[T]):
    """One tenant's queue and what it may send."""

    grant: float
    """Tokens of credit per turn."""
    credit: float = 0.0
    has_turn: bool = False
    last_turn: float = -math.inf
    """The round in which its last turn began."""
    left_at: float = 0.0
    """The round in which its queue became empty."""
    levels: dict[int, _Level[T]] = field(default_factory=dict)
    num_waiting: int = 0
    tokens: int = 0

    def put(self, entry: Waiting[T]) -> None:
        level = self.levels.setdefault(entry.priority, _Level())
        level.entries[entry] = None
        self._count(level, 1, entry.cost)

    def take(self) -> Waiting[T]:
        """Its next request, which leaves the queue."""
        entry = next(iter(self.levels[max(self.levels)].entries))
        self.remove(entry)
        return entry

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
        self._weights = dict(weights)
        self._bounds = bounds or QueueBounds()
        self._grant = quantum / min([*self._weights.values(), 1.0])
        self._accounts: dict[str, _Account[T]] = {}
        self._active: deque[_Account[T]] = deque()  # those with requests; the first has its turn or is next
        self._round = 0.0
        self.num_waiting = 0
        self.num_tokens = 0
        """Tokens that all waiting requests will compute."""
        self.num_turns = 0
        """Turns given since the start."""

    def push(self, entry: Waiting[T]) -> None:
        """Add a request. Raises QueueFull."""
        self._check_room(entry)
        account = self._accounts.get(entry.tenant)
        if account is None:
            account = _Account(self._grant * self._weight(entry.tenant))
            self._accounts[entry.tenant] = account
        if not account.num_waiting:
            self._join(account)
        account.put(entry)
        self.num_waiting += 1
        self.num_tokens += entry.cost

    def pop(self) -> Waiting[T] | None:
        """The next request to send, charged to its tenant; None when nobody waits."""
        while self._active:
            account = self._active[0]
            if not account.has_turn:
                account.has_turn, account.last_turn = True, self._round
                account.credit += account.grant
                self.num_turns += 1
                self._round += 1 / len(self._active)
            if account.credit > 0:
                return self._send(account)
            self._end_turn(account)
        return None

    def remove(self, entry: Waiting[T]) -> None:
        """Take out a request that waits. Raises KeyError when it does not."""
        account = self._accounts[entry.tenant]
        account.remove(entry)
        self._uncount(entry)
        if not account.num_waiting:
            self._active.remove(account)
            self._leave(account)

    def charge(self, tenant: str, tokens: float) -> None:
        """A request computed so much more (or less) than it was charged for when it was popped."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.credit -= tokens
            if not account.num_waiting:
                account.credit = min(account.credit, 0.0)

    def tokens_before(self, tenant: str, cost: int, priority: int = 0) -> float:
        """Tokens that would be sent before a request of `cost` that came now, its tenant's share considered."""
        own = 0
        if tenant in self._accounts:
            levels = self._accounts[tenant].levels
            own = sum(level.tokens for rank, level in levels.items() if rank >= priority)
        weight = self._weight(tenant)
        before = float(own)
        for name, account in self._accounts.items():
            if name != tenant:
                before += min(account.tokens, (own + cost) * self._weight(name) / weight)
        return before

    def waiting_of(self, tenant: str) -> int:
        """Requests of a tenant that wait."""
        account = self._accounts.get(tenant)
        return account.num_waiting if account is not None else 0

    # --- inside --------------------------------------------------------------------------------------------

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _check_room(self, entry: Waiting[T]) -> None:
        """A tenant that has nothing waiting is never kept out, however much others have."""
        bounds, account = self._bounds, self._accounts.get(entry.tenant)
        if account is None or not account.num_waiting:
            return
        if account.num_waiting >= bounds.max_requests_per_tenant:
            raise QueueFull("tenant", f"{account.num_waiting} of your requests are waiting, the limit")
        if account.tokens + entry.cost > bounds.max_tokens_per_tenant:
            limit = f"the limit is {bounds.max_tokens_per_tenant}"
            raise QueueFull("tenant", f"{account.tokens} of your prompt tokens are waiting, {limit}")
        if self.num_waiting >= bounds.max_requests:
            raise QueueFull("all", f"{self.num_waiting} requests are waiting, the limit")
        if self.num_tokens + entry.cost > bounds.max_tokens:
            raise QueueFull(
                "all", f"{self.num_tokens} prompt tokens are waiting, the limit is {bounds.max_tokens}"
            )

    def _join(self, account: _Account[T]) -> None:
        """It waits from now on: before all others when it owes nothing and took no turn for a round."""
        missed = self._round - account.left_at
        account.credit = min(account.credit + missed * account.grant, 0.0)
        if account.credit == 0 and self._round - account.last_turn >= 1:
            self._active.appendleft(account)
        else:
            self._active.append(account)

    def _send(self, account: _Account[T]) -> Waiting[T]:
        entry = account.take()
        self._uncount(entry)
        account.credit -= entry.cost
        if not account.num_waiting:
            self._active.popleft()
            self._leave(account)
        elif account.credit <= 0:
            self._end_turn(account)
        return entry

    def _end_turn(self, account: _Account[T]) -> None:
        account.has_turn = False
        self._active.rotate(-1)

    def _leave(self, account: _Account[T]) -> None:
        """Its queue is empty: what credit it has is gone."""
        account.has_turn = False
        account.credit = min(account.credit, 0.0)
        account.left_at = self._round
        if not self._active:
            self._accounts.clear()  # debts too: they are owed to those who wait

    def _uncount(self, entry: Waiting[T]) -> None:
        self.num_waiting -= 1
        self.num_tokens -= entry.cost
