"""Kills everything in turn: engines, ingresses, the metrics hub, Serve's controller, and an ingress's workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial

import psutil

from benchmarks.attackers.base import Attacker, Kind
from benchmarks.siege_app import Outage

RECOVERY_S = 300.0


class Kills(Attacker):
    """Kills a process, as the kernel does when memory runs out, and the next one when it is replaced."""

    name = "kills"

    def kinds(self) -> Mapping[str, Kind]:
        """Return a kind for each kind of process."""
        app = self.target.app
        of: dict[str, Callable[[], list[int]]] = {
            "engine": app.engines, "ingress": app.ingresses, "hub": app.hubs, "controller": app.controllers,
            "worker": self._workers,
        }  # fmt: skip
        return {f"{kind} killed": partial(self._kill, kind, pids) for kind, pids in of.items()}

    async def _kill(self, kind: str, pids: Callable[[], list[int]]) -> None:
        """Kill such a process and wait until it is replaced."""
        found = await asyncio.to_thread(pids)
        if not found:
            self.counts[f"no {kind} was there"] += 1
            return
        began = time.monotonic()
        victim = self.draw.choice(found)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        missing: list[str] = ["it was not looked at"]

        async def is_whole() -> bool:
            missing[:] = await self._missing(victim)
            return not missing

        is_back = await self.target.app.until(is_whole, RECOVERY_S)
        self.target.outages.append(Outage(kind, "killed", began, time.monotonic()))
        if not is_back:
            what = f"the application is not whole {RECOVERY_S:.0f} s after its {kind} was killed"
            self.wrong.append(f"{what}: {'; '.join(missing)}")

    async def _missing(self, victim: int) -> list[str]:
        """Return what the application lacks after the death of a process."""
        app = self.target.app
        wanted = {"engines": app.size.replicas, "ingresses": app.size.ingresses, "hubs": 1, "controllers": 1}
        there = {
            "engines": app.engines(),
            "ingresses": app.ingresses(),
            "hubs": app.hubs(),
            "controllers": app.controllers(),
        }
        lacks = [
            f"{len(there[kind])} {kind} of {count}" for kind, count in wanted.items() if len(there[kind]) < count
        ]
        # Two engines or ingresses more are being replaced; two hubs or controllers are not one application.
        lacks += [f"{len(there[kind])} {kind}" for kind in ("hubs", "controllers") if len(there[kind]) > 1]
        if any(victim in pids for pids in there.values()):
            lacks.append(f"the killed process {victim} is still there")
        if not await app.is_whole():
            lacks.append("an ingress does not listen, or is not connected to all engines")
        if not await app.samples("raydix_engine_up"):
            lacks.append("no engine is on the page of metrics")
        return lacks

    def _workers(self) -> list[int]:
        """Return the processes in which ingresses try grammars."""
        found = []
        for pid in self.target.app.ingresses():
            with contextlib.suppress(psutil.Error):
                found += [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return found
