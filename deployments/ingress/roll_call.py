"""Reports to the hub that this ingress takes requests, and learns their number, by which tenants' limits are
divided."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from deployments.telemetry.background import Background
from deployments.wire.deadlines.time_limit import timeout

logger = logging.getLogger("ray.serve")

TIMEOUT_S = 5.0
"""Seconds that the hub has to answer."""
LEAVE_S = 1.0
"""The same when this ingress says that it takes no more requests."""


class RollCall(Background):
    """Calls `on_number` with each new number of ingresses. `hub` is a `HubCalls`.

    While the hub does not answer, and while a new one does not know yet, the last number stays.
    """

    def __init__(self, hub: Any, ingress: str, on_number: Callable[[int], None]) -> None:
        self._hub, self._ingress, self._on_number = hub, ingress, on_number
        self._number: int | None = None

    async def leave(self) -> None:
        """Stop, and report to the hub that this ingress takes no more requests. Idempotent."""
        if self._task is not None:
            self.stop()
            # Without a hub, the next one notices the silence.
            with contextlib.suppress(Exception), timeout(LEAVE_S):
                await self._hub.leave.remote(self._ingress)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(Exception), timeout(TIMEOUT_S):
                self._take(await self._hub.here.remote(self._ingress))
            await self._hub.beat()

    def _take(self, number: int | None) -> None:
        if number is not None and number != self._number:
            logger.info("%d ingresses take requests; each enforces an equal share of tenants' limits", number)
            self._number = number
            self._on_number(number)
