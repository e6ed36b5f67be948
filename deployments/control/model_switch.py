"""Loads and unloads a model by setting its deployment's target number of replicas in Serve's controller.

    target 0      no replica: unloaded           replicas still finish their streams: draining
    target > 0    no replica runs yet: loading   at least one runs: loaded

The controller alone owns the target, so all ingresses agree and a restarted one finds it again. Where a model is
autoscaled, Serve starts a replica whenever a call waits for one, so no call may wait for an unloaded model:
`RemoteEngines` refuses such calls at once.
"""

from __future__ import annotations

from typing import Protocol

from deployments.client.protocol import ModelState, NotSwitchable, Unavailable
from deployments.control.controller_client import AppView, ControllerUnavailable, DeploymentView


class Controller(Protocol):
    """The part of `ControllerClient` that a switch uses."""

    async def view(self) -> AppView:
        """Return the application's present state. Raises ControllerUnavailable."""
        ...

    async def scale(self, deployment: str, count: int) -> None:
        """Set a deployment's target to `count` replicas. Raises ControllerUnavailable."""
        ...


class DeploymentSwitch:
    """The `ModelSwitch` of one engine deployment."""

    def __init__(self, controller: Controller, deployment: str, count: int) -> None:
        """Loading the model starts `count` replicas."""
        self._controller, self._deployment, self._count = controller, deployment, count

    async def state(self) -> ModelState | None:
        """The model's state; None while the controller does not answer."""
        try:
            return state_of(await self._view())
        except ControllerUnavailable:
            return None

    async def load(self) -> ModelState:
        """Start replicas. A model that has some keeps as many as it has."""
        return await self._scale(self._count)

    async def unload(self) -> ModelState:
        """Stop all replicas as soon as their streams have ended."""
        return await self._scale(0)

    async def _scale(self, count: int) -> ModelState:
        try:
            if bool((await self._view()).target) != bool(count):
                if not (await self._controller.view()).is_scalable:
                    raise NotSwitchable(
                        "models of this application cannot be loaded or unloaded while it runs: set "
                        "external_scaler_enabled: true beside import_path in its config"
                    )
                await self._controller.scale(self._deployment, count)
            return state_of(await self._view())
        except ControllerUnavailable as error:
            raise Unavailable(str(error)) from None

    async def _view(self) -> DeploymentView:
        view = (await self._controller.view()).deployments.get(self._deployment)
        if view is None:
            raise ControllerUnavailable(f"Serve knows no deployment {self._deployment!r}")
        return view


def state_of(view: DeploymentView) -> ModelState:
    """The model's state, as its deployment's target and replicas imply it."""
    if view.target == 0:
        return "draining" if view.replicas else "unloaded"
    return "loaded" if view.count("RUNNING") else "loading"
