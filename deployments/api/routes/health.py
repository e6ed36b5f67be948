"""GET /health: the state of each model's engines as this process sees them, and of the whole service.

GET /ready: whether a load balancer should send requests to this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from deployments.api.service.api_service import ApiService
from deployments.client.protocol import FleetHealth, HealthState
from deployments.wire.deadlines.steady_clock import SteadyClock

_SERVING: Collection[HealthState] = ("healthy", "degraded", "unloaded")
"""States in which some request can be served, or all models are unloaded."""


async def health(service: ApiService) -> tuple[dict[str, object], int]:
    """Return the body, and 200 if some request can be served or all models are unloaded, else 503.

    An ingress that refuses settings is degraded: it does not use the settings of its operator, as its log says.
    """
    models, refuses_settings = service.models, service.refuses_settings()
    fleets = await asyncio.gather(*(served.client.health() for served in models.values()))
    state = overall([fleet.state for fleet in fleets])
    if refuses_settings and state in _SERVING:
        state = "degraded"
    body: dict[str, object] = {
        "status": state,
        "replicas_up": sum(fleet.num_up for fleet in fleets),
        "replicas_expected": sum(fleet.num_expected for fleet in fleets),
        "replicas": [replica for fleet in fleets for replica in fleet.replicas],
        "refuses_settings": refuses_settings,
        "needs_key": not service.access.is_open,
        "has_admin_key": service.admin_key_hash is not None,
        "models": {name: _summary(fleet) for name, fleet in zip(models, fleets, strict=True)},
    }
    return body, 200 if state in _SERVING else 503


class Readiness:
    """Tells whether this process should be sent requests."""

    def __init__(self, service: ApiService, clock: Callable[[], float] | None = None) -> None:
        """`clock` should stop while this process is paused. The default is a `SteadyClock`."""
        self._service, self._clock = service, clock or SteadyClock().now
        self._served_at: float | None = None

    async def missing(self) -> str | None:
        """Return why it should not, or None. It should for a while after the last engine was lost."""
        if self._service.is_stopping():
            return "this ingress is being stopped"
        fleets = await asyncio.gather(*(served.client.health() for served in self._service.models.values()))
        now = self._clock()
        if overall([fleet.state for fleet in fleets]) in _SERVING:
            self._served_at = now
        if self._served_at is None or now - self._served_at > self._service.ready_without_engines_s:
            return "no engine answers"
        return None


def overall(states: Collection[HealthState]) -> HealthState:
    """Combine all models' states: the common one, else "degraded" while some requests can be served.

    Unloaded models are ignored if there are others.
    """
    distinct = set(states) - {"unloaded"} or set(states)
    if len(distinct) == 1:
        return distinct.pop()
    return "degraded" if distinct & {"healthy", "degraded"} else "unhealthy"


def _summary(fleet: FleetHealth) -> dict[str, object]:
    return {"status": fleet.state, "replicas_up": fleet.num_up, "replicas_expected": fleet.num_expected}
