"""The hub deployment: every process pushes its metrics to it, and every ingress reads the page from it.

Ingresses also report their most valuable prefixes to it, and new replicas request them. It counts the ingresses,
because each reports its presence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray import serve

from deployments.client.protocol import RolloutAction, Unavailable
from deployments.config.settings import MetricsSettings
from deployments.config.versions import VersionPlan
from deployments.control.orphan import end_with_raylet
from deployments.hub.rollouts import Rollouts, RolloutState
from deployments.hub.roster import Roster
from deployments.hub.server import MetricsServer, listen
from deployments.hub.warm_up_board import PrefixReport, WarmUpBoard
from deployments.telemetry.live_level import LiveLevel, Reconfigured
from deployments.wire.deadlines.steady_clock import SteadyClock
from monitoring.checkpoint import Kept, Stamp
from monitoring.gateway import gateway_gauges
from monitoring.hub import Hub, NotReady
from monitoring.page import CONTENT_TYPE
from router.fetch.hot_prefixes import HotPrefix
from router.ray_internals import keep_calls_on_this_machine, target_replicas

NOT_READY = "The metrics hub is new and still collects earlier counts; try again in a few seconds."
RenderedPage = tuple[bytes, str, Kept | None]
"""The page's text, its content type, and the checkpoint it was made from."""


def deployed_ingresses() -> int:
    """Number of ingresses that Serve is to run; 0 if it is unknown."""
    return target_replicas(serve.get_replica_context().app_name).get("Ingress", 0)


class MetricsHub:
    """The metrics of the whole application, in one replica."""

    def __init__(
        self,
        num_ingresses: int = 0,
        settings: MetricsSettings | None = None,
        count_ingresses: Callable[[], int] = lambda: 0,
        plans: Sequence[VersionPlan] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_ingresses` ingresses keep the checkpoint for the next hub (`deployments/hub/keeper.py`), or as many
        as `count_ingresses` says. `plans` are the models that have versions. `clock` is monotonic.

        Raises MetricsPortError when the hub cannot listen on the port in the settings.
        """
        end_with_raylet()
        keep_calls_on_this_machine()
        settings = settings or MetricsSettings()
        self._level = LiveLevel()
        self._reconfigured = Reconfigured(self._level.take_over)
        mirrors = (gateway_gauges,) if settings.inference_gateway else ()
        self._clock = SteadyClock(clock)  # silence counts only while this process runs
        self._hub = Hub(
            num_keepers=count_ingresses() or num_ingresses,
            born=self._clock.born,
            generation=time.time_ns(),
            mirrors=mirrors,
        )
        self._board = WarmUpBoard()
        self._roster = Roster(self._clock.born)
        self._rollouts = Rollouts(plans, self._hub, self._clock.born)
        self.server: MetricsServer | None = None
        """The server on a port of its own, where the settings have one."""
        if settings.port is not None:
            listener = listen(settings.host, settings.port, settings.port_wait_s)
            self.server = MetricsServer(listener, self._read_page)

    async def reconfigure(self, user_config: Mapping[str, Any] | None) -> None:
        """Take over the settings that a running hub can, see `deployments/config/live.py`."""
        self._reconfigured(user_config)
        self._hub.own.set("refuses_settings", float(self._reconfigured.is_refused))

    async def record_replica_metadata(self) -> dict[str, str]:
        """Start the server. Serve calls this once, after the constructor, on the event loop."""
        if self.server is not None:
            self.server.start()
        return {}

    async def together(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """Call methods of this class, by their names, with these arguments; return each result or exception."""
        called = [getattr(self, method)(*args) for method, args in calls]
        return await asyncio.gather(*called, return_exceptions=True)

    async def push(self, process: str, snapshot: bytes) -> str | None:
        """Take a process's snapshot of its metrics. Return the level at which it is to log, if one is set."""
        self._hub.push(process, snapshot, self._clock.now())
        return self._level.told

    async def render(self) -> RenderedPage | None:
        """Render the page; None while this hub is new and does not know the earlier counts yet."""
        try:
            return self._hub.render(self._clock.now()), CONTENT_TYPE, self._hub.checkpoint
        except NotReady:
            return None

    async def _read_page(self) -> tuple[bytes, str]:
        page = await self.render()
        if page is None:
            raise Unavailable(NOT_READY)
        return page[:2]

    async def keep(self, keeper: str, held: Stamp | None) -> tuple[bool, Kept | None]:
        """Return whether the ingress should `restore` its checkpoint, and a newer one for it to keep, if any."""
        return self._hub.keep(keeper, held, self._clock.now())

    async def restore(self, keeper: str, checkpoint: bytes) -> None:
        """Take the checkpoint that an ingress holds."""
        self._hub.restore(keeper, checkpoint, self._clock.now())

    async def here(self, ingress: str) -> int | None:
        """Note that an ingress takes requests. Return how many do; None while this hub is too new to know."""
        return self._roster.here(ingress, self._clock.now())

    async def leave(self, ingress: str) -> None:
        """Note that an ingress takes no more requests."""
        self._roster.leave(ingress)

    async def rollouts(self, states: Sequence[RolloutState]) -> Sequence[RolloutState]:
        """Take the states of rollouts that an ingress follows. Return those to follow from now on."""
        return self._rollouts.take(states, self._clock.now())

    async def report_rollouts(self) -> list[dict[str, Any]]:
        """Return each model that has versions, as /v1/cluster/rollouts shows it."""
        return self._rollouts.report(self._clock.now())

    async def control_rollout(
        self, model: str, action: RolloutAction
    ) -> tuple[dict[str, Any] | None, Sequence[RolloutState]]:
        """Obey an operator, see `Rollouts.control`."""
        return self._rollouts.control(model, action, self._clock.now())

    async def report_prefixes(self, ingress: str, report: PrefixReport) -> None:
        """Take an ingress's report of the prefixes worth most among a model's prompts."""
        self._board.take(ingress, report, time.monotonic())

    async def hot_prefixes(self, model: str, max_tokens: int) -> list[HotPrefix]:
        """The prefixes of a model that are worth most, best first, at most `max_tokens` in all."""
        return self._board.top(model, max_tokens, time.monotonic())
