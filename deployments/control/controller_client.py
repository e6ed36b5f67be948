"""Asks Serve's controller for this application's state and sets the target number of a deployment's replicas.

Serve 2.60 offers both only over REST ("external scaling": /api/v1/applications/{app}/deployments/{name}/scale),
which needs Ray's dashboard. This module calls the controller's two methods directly (`router/ray_internals.py`),
so it needs no dashboard. Scaling needs `external_scaler_enabled: true` in the application's config.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from deployments.wire.deadlines.time_limit import timeout
from router.ray_internals import find_controller, instance_details, set_replicas

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica as the controller sees it."""

    replica: str
    state: str
    """One of Serve's states: "STARTING", "RUNNING", "STOPPING", ..."""
    node_id: str | None = None
    node_address: str | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """One deployment as the controller sees it."""

    target: int
    """Number of replicas that Serve works towards."""
    replicas: tuple[ReplicaView, ...] = ()
    configured: int | None = None
    """Number of replicas in the deployed config; None if they are scaled, or if it is unknown."""

    def count(self, *states: str) -> int:
        """Number of replicas in one of these states."""
        return sum(replica.state in states for replica in self.replicas)


@dataclass(frozen=True, slots=True)
class AppView:
    """The application as the controller sees it."""

    deployments: Mapping[str, DeploymentView] = field(default_factory=dict)
    is_scalable: bool = False
    """Whether `external_scaler_enabled` is set."""

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> AppView:
        """Read an `ApplicationDetails` object (ray.serve.schema)."""
        deployments = {
            name: DeploymentView(
                one["target_num_replicas"], tuple(map(_replica, one["replicas"])), _configured(one)
            )
            for name, one in details["deployments"].items()
        }
        return cls(deployments, bool(details.get("external_scaler_enabled")))


class ControllerUnavailable(Exception):
    """The controller did not answer, or not in time, or does not know the application; the message says which."""


class ControllerClient:
    """Asks the controller, one call at a time, and no more often than every `max_age_s`."""

    def __init__(self, app_name: str, timeout_s: float, max_age_s: float = 0.5) -> None:
        self._app_name, self._timeout_s, self._max_age_s = app_name, timeout_s, max_age_s
        self._controller: Any = None
        self._asking: asyncio.Task[AppView] | None = None
        self._known: AppView | None = None
        self._known_at = 0.0

    async def view(self) -> AppView:
        """Return the application's state, at most `max_age_s` old. Raises ControllerUnavailable."""
        if self._known is not None and time.monotonic() - self._known_at <= self._max_age_s:
            return self._known
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def proxy_port(self) -> int | None:
        """Return the port of Serve's HTTP proxy; None if it is disabled. Raises ControllerUnavailable."""
        details = await self._call(instance_details)
        if details.get("proxy_location") == "Disabled":
            return None
        return int((details.get("http_options") or {}).get("port", 8000))

    async def scale(self, deployment: str, count: int) -> None:
        """Set a deployment's target; return when the controller has noted it. Raises ControllerUnavailable."""
        await self._call(partial(set_replicas, app=self._app_name, deployment=deployment, count=count))
        self._known = self._asking = None  # A view that was requested before the change may lack it.

    async def _ask(self) -> AppView:
        details = await self._call(instance_details)
        application = details["applications"].get(self._app_name)
        if application is None:
            raise ControllerUnavailable(f"Serve knows no application {self._app_name!r}")
        self._known, self._known_at = AppView.from_details(application), time.monotonic()
        return self._known

    async def _call(self, method: Callable[[Any], Awaitable[T]]) -> T:
        import ray

        try:
            with timeout(self._timeout_s):
                if self._controller is None:
                    self._controller = await asyncio.to_thread(find_controller)
                return await method(self._controller)
        except TimeoutError:
            reason = f"Serve's controller has not answered within {self._timeout_s:g} s"
            raise ControllerUnavailable(reason) from None
        except (ray.exceptions.RayError, ConnectionError, ValueError) as error:
            self._controller = None
            raise ControllerUnavailable(f"Serve's controller does not answer: {type(error).__name__}") from None


def _configured(details: Mapping[str, Any]) -> int | None:
    config = details.get("deployment_config") or {}
    count = config.get("num_replicas")
    return count if isinstance(count, int) and not config.get("autoscaling_config") else None


def _replica(details: Mapping[str, Any]) -> ReplicaView:
    state = details["state"]
    return ReplicaView(
        details["replica_id"],
        str(getattr(state, "value", state)),
        details.get("node_id"),
        details.get("node_ip"),
        details.get("pid"),
    )
