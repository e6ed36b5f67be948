"""Decides when a new ingress begins to listen: the kernel gives connections to all that do, ready or not.

no other process listens           immediately: "model x is loading" is better than a refused connection
others listen, and can answer      when an engine of each model answers it, except models that are unloaded
no engine comes                    after `health.migration_wait_s`
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from deployments.wire.deadlines.deadline import awake_now

logger = logging.getLogger("ray.serve")

LOOK_S = 0.1
"""Seconds between two looks whether engines answer, and whether others still listen."""


class SharedPort(Protocol):
    """The part of `HttpServer` that is asked."""

    async def is_served_by_others(self) -> bool:
        """Return whether another process listens on the port."""


async def until_useful(
    port: SharedPort, without_engines: Callable[[], Awaitable[Collection[str]]], timeout_s: float
) -> None:
    """Return when this ingress should listen. `without_engines` returns the models that lack an engine."""
    deadline = awake_now() + timeout_s
    while lacking := await without_engines():
        if not await port.is_served_by_others():
            return
        if awake_now() >= deadline:
            names = ", ".join(sorted(lacking))
            logger.warning("no engine of %s has answered for %g s: this ingress listens anyway", names, timeout_s)
            return
        await asyncio.sleep(LOOK_S)
