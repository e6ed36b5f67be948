"""The `EngineClient` of one model: a request waits for its turn, then is sent to an engine.

generate ─▶ AdmissionControl.admit ── its turn ──▶ Engines.generate ──▶ Generation
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deployments.client.protocol import (
    UNLOADED_STATES,
    AdmissionControl,
    Engines,
    FleetHealth,
    FoundPart,
    FoundStream,
    GenerateRequest,
    Generation,
    ModelState,
    ModelSwitch,
    Unavailable,
)


class ModelClient:
    """Generates with one model. Lives on one event loop."""

    def __init__(self, engines: Engines, admission: AdmissionControl, switch: ModelSwitch | None = None) -> None:
        """`switch` says whether the model is unloaded; with None it never is."""
        self._engines, self._admission, self._switch = engines, admission, switch

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return once an engine accepted; raise Overloaded, Unavailable or Rejected when none did.

        While there is no engine the request waits for one, unless the model is unloaded.
        """
        if self._engines.are_awaited and await self._state() in UNLOADED_STATES:
            self._engines.expect_none()
        try:
            return await self._generate(request)
        except Unavailable as error:
            raise await self._explained(error, request.model) from None

    async def _generate(self, request: GenerateRequest) -> Generation:
        turn = await self._admission.admit(self._engines.prepared(request))
        try:
            return await self._engines.generate(turn.request, turn)
        except BaseException:  # or its client has left
            turn.refused()
            raise
        finally:
            turn.sent()

    async def find(self, name: str, tenant: str) -> FoundStream | None:
        """Return a tenant's resumable stream from the replicas that have it; None if none that answers has it."""
        return await self._engines.find(name, tenant)

    async def adopt(self, request: GenerateRequest, found: FoundPart) -> Generation:
        """Continue to read a request's stream from its first token, without waiting for a turn."""
        return await self._engines.adopt(self._engines.prepared(request), found)

    async def health(self) -> FleetHealth:
        """Return the engines' health. An unloaded model is not unhealthy: it is expected to have no replicas."""
        fleet = await self._engines.health()
        if fleet.num_up == 0 and await self._state() in UNLOADED_STATES:
            return replace(fleet, state="unloaded", num_expected=0)
        return fleet

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """Return the last placements, newest first."""
        return self._engines.decisions(limit)

    async def _state(self) -> ModelState | None:
        return None if self._switch is None else await self._switch.state()

    async def _explained(self, error: Unavailable, model: str) -> Unavailable:
        """Return an error that names the model's state if this is the reason that no engine is available."""
        state = await self._state()
        if state in UNLOADED_STATES:
            return Unavailable(f"model {model} is not loaded; POST /v1/models/{model}/load loads it")
        return Unavailable(f"model {model} is loading") if state == "loading" else error
