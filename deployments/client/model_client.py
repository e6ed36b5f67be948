"""`EngineClient` of one model: a request waits for its turn, then an engine takes it.

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
    GenerateRequest,
    Generation,
    ModelSwitch,
    Unavailable,
)


class ModelClient:
    """Lives on one event loop."""

    def __init__(self, engines: Engines, admission: AdmissionControl, switch: ModelSwitch | None = None) -> None:
        """`switch` knows whether the model is unloaded; None: it never is."""
        self._engines, self._admission, self._switch = engines, admission, switch

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return once an engine accepted; raise Overloaded, Unavailable or Rejected when none did."""
        turn = await self._admission.admit(self._engines.prepared(request))
        try:
            return await self._engines.generate(turn.request, turn)
        except Unavailable as error:
            turn.refused()
            raise await self._explained(error, request.model) from None
        except Exception:
            turn.refused()
            raise
        finally:
            turn.sent()

    async def health(self) -> FleetHealth:
        """How the engines are. An unloaded model is not ill: nothing is expected of it."""
        fleet = await self._engines.health()
        if fleet.num_up == 0 and self._switch is not None and await self._switch.state() in UNLOADED_STATES:
            return replace(fleet, state="unloaded", num_expected=0)
        return fleet

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The last placements, newest first."""
        return self._engines.decisions(limit)

    async def _explained(self, error: Unavailable, model: str) -> Unavailable:
        """Why no engine is there, where the model itself is the reason."""
        state = None if self._switch is None else await self._switch.state()
        if state in UNLOADED_STATES:
            return Unavailable(f"model {model} is not loaded; POST /v1/models/{model}/load loads it")
        return Unavailable(f"model {model} is loading") if state == "loading" else error
