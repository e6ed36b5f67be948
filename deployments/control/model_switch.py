"""Loading a model and putting it away: its deployment's number of replicas, kept by Serve's controller.

    target 0      no replica: unloaded      replicas that still end their streams: draining
    target > 0    none runs yet: loading    at least one runs: loaded

The controller is the one owner of the target, so all ingresses agree and a restarted one finds it again. Where a
model is autoscaled, Serve starts a replica whenever a call waits for one, so no call may wait for a model that was
put away: `WireEngineClient` refuses them at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from deployments.client.protocol import (
    EngineClient,
    FleetHealth,
    GenerateRequest,
    Generation,
    ModelState,
    ModelSwitch,
    NotSwitchable,
    Unavailable,
)
from deployments.control.serve_control import AppView, ControllerSilent, DeploymentView

PUT_AWAY = ("unloaded", "draining")
"""States of a model that takes no requests until it is loaded."""


class Control(Protocol):
    """What a switch needs of Serve: `ServeControl`, or a test's."""

    async def view(self) -> AppView:
        """The application. Raises ControllerSilent."""
        ...

    async def scale(self, deployment: str, count: int) -> None:
        """Have that many replicas. Raises ControllerSilent."""
        ...


class DeploymentSwitch:
    """`ModelSwitch` of one engine deployment."""

    def __init__(self, control: Control, deployment: str, count: int) -> None:
        """`count` replicas is what a loaded model begins with."""
        self._control, self._deployment, self._count = control, deployment, count

    async def state(self) -> ModelState | None:
        """What the controller says; None when it says nothing."""
        try:
            return state_of(await self._view())
        except ControllerSilent:
            return None

    async def load(self) -> ModelState:
        """Have replicas. A model that has some keeps as many as it has."""
        return await self._order(self._count)

    async def unload(self) -> ModelState:
        """Have none, when their streams have ended."""
        return await self._order(0)

    async def _order(self, count: int) -> ModelState:
        try:
            if bool((await self._view()).target) != bool(count):
                if not (await self._control.view()).is_scalable:
                    raise NotSwitchable(
                        "models of this application cannot be loaded or unloaded while it runs: set "
                        "external_scaler_enabled: true beside import_path in its config"
                    )
                await self._control.scale(self._deployment, count)
            return state_of(await self._view())
        except ControllerSilent as error:
            raise Unavailable(str(error)) from None

    async def _view(self) -> DeploymentView:
        view = (await self._control.view()).deployments.get(self._deployment)
        if view is None:
            raise ControllerSilent(f"Serve knows no deployment {self._deployment!r}")
        return view


def state_of(view: DeploymentView) -> ModelState:
    """A model's state by its deployment's target and replicas."""
    if view.target == 0:
        return "draining" if view.replicas else "unloaded"
    return "loaded" if view.count("RUNNING") else "loading"


class SwitchedEngines:
    """An `EngineClient` that says so when its engines were put away, rather than that they are missing."""

    def __init__(self, client: EngineClient, switch: ModelSwitch) -> None:
        self._client, self._switch = client, switch

    async def generate(self, request: GenerateRequest) -> Generation:
        """As the client does; asks for the reason only when no engine is there."""
        try:
            return await self._client.generate(request)
        except Unavailable:
            state = await self._switch.state()
            if state in PUT_AWAY:
                name = request.model
                raise Unavailable(f"model {name} is not loaded; POST /v1/models/{name}/load loads it") from None
            if state == "loading":
                raise Unavailable(f"model {request.model} is loading") from None
            raise

    async def health(self) -> FleetHealth:
        """A model that was put away is not ill: nothing is expected of it."""
        fleet = await self._client.health()
        state = await self._switch.state() if fleet.num_up == 0 else None
        if state in PUT_AWAY:
            return replace(fleet, state="unloaded", num_expected=0)
        return fleet

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The client's."""
        return self._client.decisions(limit)
