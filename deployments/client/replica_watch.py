"""Notices immediately that a replica's process has died, by a call that the replica keeps open while both live.

    Watch ── Watcher.watch(replica) ── open ──▶ ended by the replica, which is stopping and has no streams left
                                           └──▶ ReplicaDied: its process is gone

Serve counts the open call, so a replica that it is stopping lives until its streams have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal, Protocol

logger = logging.getLogger("ray.serve")

RETRY_S = 0.5
"""Seconds after which a watch that ended, or that failed for another reason than a death, is restarted."""


class ReplicaDied(Exception):
    """The replica's process is gone."""


class Watcher(Protocol):
    """Makes the calls: over a Serve handle in an ingress."""

    async def watch(self, replica: str, ingress_id: str) -> None:
        """Return when the replica ends the call. Raises ReplicaDied; another exception when the call failed."""
        ...


class Watch:
    """Watches one replica from its connection to its end. Lives on one event loop."""

    def __init__(
        self,
        watcher: Watcher,
        replica: str,
        ingress_id: str,
        on_death: Callable[[str, Literal["died"], str], None],
        is_member: Callable[[], bool] = lambda: True,
    ) -> None:
        """`on_death` receives the replica, "died" and the reason. `is_member` returns whether Serve has the
        replica: a call for one that it no longer has would wait, and waiting calls make Serve start replicas.
        """
        self._watcher, self._replica, self._ingress_id = watcher, replica, ingress_id
        self._on_death, self._is_member = on_death, is_member
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """End the call. Idempotent."""
        self._task.cancel()

    async def _run(self) -> None:
        has_failed = False
        while True:
            try:
                if self._is_member():
                    await self._watcher.watch(self._replica, self._ingress_id)
                    has_failed = False
            except ReplicaDied as error:
                return self._on_death(self._replica, "died", str(error))
            except Exception as error:
                if not has_failed:  # logged only once while Serve's controller is away
                    logger.warning("the watch of replica %s failed: %r", self._replica, error)
                has_failed = True
            await asyncio.sleep(RETRY_S)
