"""The hub as a deployment: every process pushes its numbers here, every ingress reads the page.

It is also where ingresses tell which prefixes are worth most, and where new replicas ask for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from deployments.client.protocol import Unavailable
from deployments.config.settings import MetricsSettings
from deployments.hub.server import MetricsServer, listen
from deployments.replica.warm_up import Post, WarmUpBoard
from monitoring.checkpoint import Kept, Stamp
from monitoring.gateway import gateway_gauges
from monitoring.hub import Hub, NotReady
from monitoring.page import CONTENT_TYPE
from router.hot_prefixes import HotPrefix

logger = logging.getLogger("ray.serve")

PUSH_PERIOD_S = 1.0
NOT_READY = "The metrics hub is new and still asks what was counted before it; try again in a few seconds."
Page = tuple[bytes, str, Kept | None]
"""Its text, its content type, and what it was made of."""


class MetricsHub:
    """One replica holds the numbers of the whole application."""

    def __init__(self, num_ingresses: int = 0, settings: MetricsSettings | None = None) -> None:
        """The ingresses keep what a hub needs that comes after this one: see `deployments/hub/keeper.py`.

        Raises MetricsPortError when the settings name a port that cannot be had.
        """
        settings = settings or MetricsSettings()
        mirrors = (gateway_gauges,) if settings.inference_gateway else ()
        self._hub = Hub(
            num_keepers=num_ingresses, born=time.monotonic(), generation=time.time_ns(), mirrors=mirrors
        )
        self._board = WarmUpBoard()
        self._server: MetricsServer | None = None
        if settings.port is not None:
            self._server = MetricsServer(listen(settings.host, settings.port), self._read_page)

    async def record_replica_metadata(self) -> dict[str, str]:
        """Serve calls this once, after the constructor, on the event loop."""
        if self._server is not None:
            self._server.start()
        return {}

    async def push(self, process: str, snapshot: bytes) -> None:
        """Take a process's snapshot."""
        self._hub.push(process, snapshot, time.monotonic())

    async def render(self) -> Page | None:
        """The page; None while this hub is new and does not know yet what was counted before it."""
        try:
            return self._hub.render(time.monotonic()), CONTENT_TYPE, self._hub.checkpoint
        except NotReady:
            return None

    async def _read_page(self) -> tuple[bytes, str]:
        page = await self.render()
        if page is None:
            raise Unavailable(NOT_READY)
        return page[:2]

    async def keep(self, keeper: str, held: Stamp | None) -> tuple[bool, Kept | None]:
        """An ingress says what it holds: whether to `restore` it here, and what to hold in its place."""
        return self._hub.keep(keeper, held, time.monotonic())

    async def restore(self, keeper: str, checkpoint: bytes) -> None:
        """Take what an ingress holds."""
        self._hub.restore(keeper, checkpoint, time.monotonic())

    async def post_prefixes(self, ingress: str, post: Post) -> None:
        """Take what an ingress knows of a model's prompts."""
        self._board.post(ingress, post, time.monotonic())

    async def hot_prefixes(self, model: str, max_tokens: int) -> list[HotPrefix]:
        """The prefixes of a model worth most, of at most `max_tokens` together."""
        return self._board.top(model, max_tokens, time.monotonic())


class MetricsPusher:
    """Pushes one process's numbers once a second. A hub that is away costs nothing but fresh numbers."""

    def __init__(
        self, hub: Any, process: str, snapshot: Callable[[], bytes], *, mirror_to_ray: bool = False
    ) -> None:
        """With `mirror_to_ray` they go to Ray's own metrics as well."""
        self._hub, self._process, self._snapshot = hub, process, snapshot
        self._mirror: Callable[[bytes], None] | None = None
        if mirror_to_ray:
            from monitoring.ray_mirror import RayMirror  # only here: everything else in this file runs without Ray

            self._mirror = RayMirror().report
        self.num_failed = 0
        """Pushes that did not arrive."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._task = asyncio.create_task(self._push_forever())

    def stop(self) -> None:
        """End. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _push_forever(self) -> None:
        while True:
            try:
                snapshot = self._snapshot()
                self._mirror_to_ray(snapshot)
                async with asyncio.timeout(5 * PUSH_PERIOD_S):
                    await self._hub.push.remote(self._process, snapshot)
            except Exception:
                self.num_failed += 1
            await asyncio.sleep(PUSH_PERIOD_S)

    def _mirror_to_ray(self, snapshot: bytes) -> None:
        if self._mirror is None:
            return
        try:
            self._mirror(snapshot)
        except Exception:  # it must not cost us our own page
            logger.exception("Ray does not take metrics; from now on it gets none of this process")
            self._mirror = None
