"""Pushes a snapshot of a process's metrics, counted in memory, to the hub at each beat (`hub/calls.py`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from deployments.telemetry.background import Background
from deployments.wire.deadlines.time_limit import timeout

logger = logging.getLogger("ray.serve")

TIMEOUT_S = 5.0
"""Seconds in which the hub must receive a snapshot."""


class MetricsPusher(Background):
    """Pushes one process's metrics. While the hub is away, its page only becomes older."""

    def __init__(
        self,
        hub: Any,
        process: str,
        snapshot: Callable[[], bytes],
        *,
        mirror_to_ray: bool = False,
        on_level: Callable[[str | None], None] = lambda level: None,
    ) -> None:
        """`hub` is a `HubCalls`. With `mirror_to_ray` the metrics also go to Ray's own. `on_level` is called
        with the log level that the hub sends.
        """
        self._hub, self._process, self._snapshot, self._on_level = hub, process, snapshot, on_level
        self._mirror: Callable[[bytes], None] | None = None
        if mirror_to_ray:
            from monitoring.ray_mirror import RayMirror  # only here, so that the module works without Ray

            self._mirror = RayMirror().report
        self.num_failed = 0
        """Pushes that the hub did not receive."""

    async def _run(self) -> None:
        while True:
            try:
                snapshot = self._snapshot()
                self._mirror_to_ray(snapshot)
                with timeout(TIMEOUT_S):
                    self._on_level(await self._hub.push.remote(self._process, snapshot))
            except Exception:
                self.num_failed += 1
            await self._hub.beat()

    def _mirror_to_ray(self, snapshot: bytes) -> None:
        if self._mirror is None:
            return
        try:
            self._mirror(snapshot)
        except Exception:  # it must not affect the hub's page
            logger.exception("Ray refused this process's metrics; no more are sent to it")
            self._mirror = None
