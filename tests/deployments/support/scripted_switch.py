"""A switch of a model that the test scripts."""

from __future__ import annotations

from dataclasses import dataclass, field

from deployments.client.protocol import ModelState


@dataclass
class ScriptedSwitch:
    """A switch that obeys at once, or refuses."""

    now: ModelState | None = "loaded"
    refuse_with: Exception | None = None
    orders: list[str] = field(default_factory=list)

    async def state(self) -> ModelState | None:
        return self.now

    async def load(self) -> ModelState:
        return self._order("load", "loading")

    async def unload(self) -> ModelState:
        return self._order("unload", "draining")

    def _order(self, order: str, state: ModelState) -> ModelState:
        if self.refuse_with is not None:
            raise self.refuse_with
        self.orders.append(order)
        self.now = state
        return state
