"""Who goes first: where each request stands.

    policy      who takes turns     in a line, first is             a waiting request may push out of the batch
    fcfs        nobody: one line    who came first                  nobody
    priority    nobody: one line    who has the largest claim       lower priorities that stand behind it
    fair        tenants             who has the largest claim       the same, of its own tenant

A claim is 2 ** (priority + seconds since arrival / half_life): each level of priority doubles it, and so does each
half-life of waiting. What a newcomer of higher priority has ahead of a request that waits therefore halves with
every half-life, and nobody is overtaken by who comes more than `half_life` seconds per level later: no flood of
high priority starves a low one.

The ratio of two claims does not change with time, as both double together:

    claim(a) / claim(b) = 2 ** ((priority_a - arrival_a / half_life) - (priority_b - arrival_b / half_life))

So the order is that of arrival - half_life * priority, fixed when a request comes: queues stay sorted without ever
being sorted again. A preempted request keeps its place, and its claim has grown all the while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from engine.request import QueuePosition, Request


class QueuePolicy(Protocol):
    """A policy."""

    def position(self, request: Request) -> QueuePosition:
        """Where it stands: a function of what a request has from its arrival on."""
        ...


class FirstComeFirstServed:
    """Whoever came first, whatever the priorities."""

    def position(self, request: Request) -> QueuePosition:
        """By arrival."""
        return QueuePosition(request.arrival, request.arrival, "", 0)


@dataclass(frozen=True, slots=True)
class PriorityWithAgeing:
    """The largest claim; among equal priorities whoever came first."""

    half_life_s: float
    """Seconds of waiting that weigh as much as one level of priority."""

    def position(self, request: Request) -> QueuePosition:
        """By claim."""
        effective_arrival = request.arrival - self.half_life_s * request.priority
        return QueuePosition(effective_arrival, request.arrival, "", request.priority)


@dataclass(frozen=True, slots=True)
class FairAmongTenants:
    """Tenants take turns in computed tokens, with equal weights; within a tenant, the largest claim."""

    half_life_s: float
    """Seconds of waiting that weigh as much as one level of priority."""

    def position(self, request: Request) -> QueuePosition:
        """By claim, in the tenant's own line."""
        return PriorityWithAgeing(self.half_life_s).position(request)._replace(queue=request.tenant)


POLICIES: Mapping[str, Callable[[float], QueuePolicy]] = MappingProxyType(
    {
        "fcfs": lambda half_life_s: FirstComeFirstServed(),
        "priority": PriorityWithAgeing,
        "fair": FairAmongTenants,
    }
)


def policy_named(policy: str | QueuePolicy, half_life_s: float = 30.0) -> QueuePolicy:
    """The policy of that name; a policy is returned as it is. Raises ValueError for an unknown name."""
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; known are {', '.join(sorted(POLICIES))}")
    return POLICIES[policy](half_life_s)
