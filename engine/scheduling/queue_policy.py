"""Queue policies order requests by a position that each request gets when it arrives.

    policy      queues              first in a queue                a waiting request may preempt
    fcfs        one                 the earliest arrival            none
    priority    one                 the largest claim               less urgent ones that stand behind it
    fair        one per tenant      the largest claim               the same, of its own tenant
                (they take turns)

The smaller a request's priority, the more urgent it is, as in vLLM. A claim is
2 ** (seconds since arrival / half_life - priority): each level of priority doubles it, and so does each half-life
of waiting. The lead that a more urgent newcomer has over a waiting request therefore halves with every half-life,
and no request is overtaken by one that arrives more than `half_life` seconds per level later: a flood of urgent
requests does not starve the others.

Requests of batches are deferrable: under every policy they stand behind all others, which preempt them without
waiting and without regard to priorities. Among themselves, tenants take turns.

Tenants share rows and steps under every policy (`engine/tenants/tenant_shares.py`).

The ratio of two claims does not change with time, because both double together:

    claim(a) / claim(b) = 2 ** ((priority_b + arrival_b / half_life) - (priority_a + arrival_a / half_life))

The order is therefore that of arrival + half_life * priority, which is fixed on arrival: queues stay sorted. A
preempted request keeps its position, and its claim continues to grow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from engine.values.request import QueuePosition, Request


class QueuePolicy(Protocol):
    """Decides which requests go first."""

    def position(self, request: Request) -> QueuePosition:
        """Return the position of `request`, which depends only on facts known at its arrival."""


class FirstComeFirstServed:
    """The earliest arrival first, without regard to priorities."""

    def position(self, request: Request) -> QueuePosition:
        """Order by arrival."""
        return QueuePosition(request.is_deferrable, request.arrival, request.arrival, "", 0)


@dataclass(frozen=True, slots=True)
class PriorityWithAgeing:
    """The largest claim first; among equal priorities, the earliest arrival."""

    half_life_s: float
    """Seconds of waiting that weigh as much as one level of priority."""

    def position(self, request: Request) -> QueuePosition:
        """Order by claim."""
        effective_arrival = request.arrival + self.half_life_s * request.priority
        return QueuePosition(request.is_deferrable, effective_arrival, request.arrival, "", -request.priority)


@dataclass(frozen=True, slots=True)
class FairAmongTenants:
    """Tenants take turns in computed tokens, with equal weights; within a tenant, the largest claim."""

    half_life_s: float
    """Seconds of waiting that weigh as much as one level of priority."""

    def position(self, request: Request) -> QueuePosition:
        """Order by claim, in the tenant's own queue."""
        return PriorityWithAgeing(self.half_life_s).position(request)._replace(queue=request.tenant)


POLICIES: Mapping[str, Callable[[float], QueuePolicy]] = MappingProxyType(
    {
        "fcfs": lambda half_life_s: FirstComeFirstServed(),
        "priority": PriorityWithAgeing,
        "fair": FairAmongTenants,
    }
)


def position_of(request: Request, policy: QueuePolicy) -> QueuePosition:
    """Return the position of a request: by the policy, but behind all others if it is deferrable."""
    position = policy.position(request)
    return position._replace(queue=f"{request.tenant}/deferrable") if request.is_deferrable else position


def policy_named(policy: str | QueuePolicy, half_life_s: float = 30.0) -> QueuePolicy:
    """Return the policy with this name, or `policy` itself if it is one. Raises ValueError for an unknown name."""
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; known are {', '.join(sorted(POLICIES))}")
    return POLICIES[policy](half_life_s)
