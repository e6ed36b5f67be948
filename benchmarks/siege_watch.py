"""Watches the application during the siege: the delay of its ingresses' event loops, and its processes' memory."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import psutil

from benchmarks.siege_app import Target

PERIOD_S = 1.0
MIB = 2**20


@dataclass(slots=True)
class Seen:
    """The worst that was seen. Times are in seconds, memory in MiB."""

    loop_lag_s: float = 0.0
    """Longest delay of an ingress's event loop."""
    rss_mib: dict[str, int] = field(default_factory=dict)
    """Most memory of one process, by its kind."""
    num_looks: int = 0


class Watch:
    """Looks at the application from `start` to `stop`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.seen = Seen()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_on())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _look_on(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(PERIOD_S)

    async def _look(self) -> None:
        lags = await self._target.app.samples("raydix_ingress_loop_lag_seconds")
        self.seen.loop_lag_s = max([self.seen.loop_lag_s, *(lag for _, lag in lags)])
        for kind, pids in await asyncio.to_thread(processes, self._target):
            for pid in pids:
                with contextlib.suppress(psutil.Error):
                    rss = psutil.Process(pid).memory_info().rss // MIB
                    self.seen.rss_mib[kind] = max(self.seen.rss_mib.get(kind, 0), rss)
        self.seen.num_looks += 1


def processes(target: Target) -> list[tuple[str, list[int]]]:
    """Return the application's processes by kind."""
    app = target.app
    return [
        ("engine", app.engines()), ("ingress", app.ingresses()), ("hub", app.hubs()),
        ("controller", app.controllers()),
    ]  # fmt: skip
