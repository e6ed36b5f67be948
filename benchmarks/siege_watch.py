"""Watches the application during the siege: its event loops' delays and its processes' memory, against bounds.

A delay is also the machine's, which runs attackers, clients and all processes on its cores. The bound is for the
part in which the ingress itself computed: `raydix_ingress_loop_own_lag_seconds`. Each reading is judged at once,
and counts also when its process is killed then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from benchmarks.siege_app import MAX_TOTAL_BODY_BYTES, Target
from deployments.api.http.body_memory import MEMORY_FACTOR

PERIOD_S = 1.0
MIB = 2**20
MAX_OWN_LAG_S = 0.15
"""Three times what docs/security.md promises, for machines that are slow or share a core, as the tests do."""
MAX_RSS_MIB: Mapping[str, int] = {
    # At rest an engine has 400 MiB and an ingress 200, most of it code; the rest is for what clients send.
    "engine": 900,
    "ingress": 700,
    "hub": 300,
    "controller": 400,
}
"""Most memory of one process, in MiB."""
assert MAX_RSS_MIB["ingress"] * MIB < MEMORY_FACTOR * MAX_TOTAL_BODY_BYTES, "stricter than what is documented"


@dataclass(slots=True)
class Seen:
    """The worst that was seen. Times are in seconds, memory in MiB."""

    loop_lag_s: float = 0.0
    """Longest delay of an ingress's event loop, for whatever reason."""
    own_lag_s: float = 0.0
    """Longest of them as far as the ingress itself computed."""
    rss_mib: dict[str, int] = field(default_factory=dict)
    """Most memory of one process, by its kind."""
    num_looks: int = 0
    beyond: list[str] = field(default_factory=list)
    """Bounds that were broken."""


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
        for _, lag in await self._target.app.samples("raydix_ingress_loop_lag_seconds"):
            self.seen.loop_lag_s = max(self.seen.loop_lag_s, lag)
        for labels, lag in await self._target.app.samples("raydix_ingress_loop_own_lag_seconds"):
            self.see_own_lag(labels["replica"], lag)
        for kind, pids in (await asyncio.to_thread(processes, self._target)).items():
            for pid in pids:
                with contextlib.suppress(psutil.Error):
                    self.see_rss(kind, psutil.Process(pid).memory_info().rss // MIB)
        self.seen.num_looks += 1

    def see_own_lag(self, replica: str, lag: float) -> None:
        """Take in a delay that was read."""
        if lag > max(MAX_OWN_LAG_S, self.seen.own_lag_s):
            what = f"{lag * 1e3:.0f} ms by its own work, the bound is {MAX_OWN_LAG_S * 1e3:.0f}"
            self.seen.beyond.append(f"the event loop of ingress {replica} was late for {what}")
        self.seen.own_lag_s = max(self.seen.own_lag_s, lag)

    def see_rss(self, kind: str, mib: int) -> None:
        """Take in a process's memory that was read."""
        most = self.seen.rss_mib.get(kind, 0)
        if mib > max(MAX_RSS_MIB[kind], most):
            self.seen.beyond.append(f"an {kind} has {mib} MiB, the bound is {MAX_RSS_MIB[kind]}")
        self.seen.rss_mib[kind] = max(most, mib)


def processes(target: Target) -> dict[str, list[int]]:
    """Return the application's processes by kind."""
    app = target.app
    return {
        "engine": app.engines(), "ingress": app.ingresses(), "hub": app.hubs(), "controller": app.controllers(),
    }  # fmt: skip
