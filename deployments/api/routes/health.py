"""GET /health: the state of each model's engines as this process sees them, and of the whole service."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from deployments.api.service import ServedModel
from deployments.client.protocol import FleetHealth, HealthState


async def health(models: Mapping[str, ServedModel]) -> tuple[dict[str, object], int]:
    """Return the body, and 200 if some request can be served or all models are unloaded, else 503."""
    fleets = await asyncio.gather(*(served.client.health() for served in models.values()))
    state = overall([fleet.state for fleet in fleets])
    body: dict[str, object] = {
        "status": state,
        "replicas_up": sum(fleet.num_up for fleet in fleets),
        "replicas_expected": sum(fleet.num_expected for fleet in fleets),
        "replicas": [replica for fleet in fleets for replica in fleet.replicas],
        "models": {name: _summary(fleet) for name, fleet in zip(models, fleets, strict=True)},
    }
    return body, 200 if state in ("healthy", "degraded", "unloaded") else 503


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
