"""Loads and unloads a model by setting its deployments' target numbers of replicas in Serve's controller.

    target 0      no replica: unloaded           replicas still finish their streams: draining
    target > 0    no replica runs yet: loading   at least one runs: loaded

Only the controller owns the target, so all ingresses agree and a restarted one finds it again. If a model is
autoscaled, Serve starts a replica whenever a call waits for one, so no call may wait for an unloaded model:
`RemoteEngines` refuses such calls immediately. A model has one deployment, or one for each role; either role can
do the other's work, so they count together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from deployments.client.protocol import ModelState, NotSwitchable, Unavailable
from deployments.control.controller_client import AppView, ControllerUnavailable, DeploymentView


class Controller(Protocol):
    """The part of `ControllerClient` that a switch uses."""

    async def view(self) -> AppView:
        """Return the application's present state. Raises ControllerUnavailable."""

    async def scale(self, deployment: str, count: int) -> None:
        """Set a deployment's target to `count` replicas. Raises ControllerUnavailable."""


class DeploymentSwitch:
    """The `ModelSwitch` of one model's engine deployments."""

    def __init__(self, controller: Controller, counts: Mapping[str, int]) -> None:
        """`counts` has how many replicas of each deployment the model's loading starts, unless the deployed config
        says it.
        """
        self._controller, self._counts = controller, counts

    async def state(self) -> ModelState | None:
        """Return the model's state; None while the controller does not answer."""
        try:
            return state_of(together(await self._views()))
        except ControllerUnavailable:
            return None

    async def targets(self) -> dict[str, int] | None:
        """Return each deployment's target number of replicas; None while the controller does not answer."""
        try:
            return {name: view.target for name, view in (await self._views()).items()}
        except ControllerUnavailable:
            return None

    async def load(self) -> ModelState:
        """Start replicas. A model with replicas keeps their number."""
        return await self._scale(self._counts)

    async def unload(self) -> ModelState:
        """Stop all replicas as soon as their streams have ended."""
        return await self._scale(dict.fromkeys(self._counts, 0))

    async def _scale(self, counts: Mapping[str, int]) -> ModelState:
        try:
            views = await self._views()
            changes = {name: n for name, n in counts.items() if bool(views[name].target) != bool(n)}
            for name, count in changes.items():
                count = count and (views[name].configured or count)
                if not (await self._controller.view()).is_scalable:
                    raise NotSwitchable(
                        "models of this application cannot be loaded or unloaded while it runs: set "
                        "external_scaler_enabled: true next to import_path in its config"
                    )
                await self._controller.scale(name, count)
            return state_of(together(await self._views()))
        except ControllerUnavailable as error:
            raise Unavailable(str(error)) from None

    async def _views(self) -> dict[str, DeploymentView]:
        known = (await self._controller.view()).deployments
        for name in self._counts:
            if name not in known:
                raise ControllerUnavailable(f"Serve knows no deployment {name!r}")
        return {name: known[name] for name in self._counts}


def together(views: Mapping[str, DeploymentView]) -> DeploymentView:
    """Return a model's deployments as if they were one."""
    replicas = tuple(replica for view in views.values() for replica in view.replicas)
    return DeploymentView(sum(view.target for view in views.values()), replicas)


def state_of(view: DeploymentView) -> ModelState:
    """Return the model's state, as its deployments' target and replicas imply it."""
    if view.target == 0:
        return "draining" if view.replicas else "unloaded"
    return "loaded" if view.count("RUNNING") else "loading"
