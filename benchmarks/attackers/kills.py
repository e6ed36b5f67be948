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
        is_back = await self.target.app.until(lambda: self._is_whole(victim), RECOVERY_S)
        self.target.outages.append(Outage(kind, "killed", began, time.monotonic()))
        if not is_back:
            self.wrong.append(f"the application is not whole {RECOVERY_S:.0f} s after its {kind} was killed")

    async def _is_whole(self, victim: int) -> bool:
        app = self.target.app
        everything = [*app.engines(), *app.ingresses(), *app.hubs(), *app.controllers()]
        return (
            victim not in everything
            and len(app.engines()) >= app.size.replicas
            and len(app.hubs()) == len(app.controllers()) == 1
            and await app.is_whole()
            and bool(await app.samples("raydix_engine_up"))
        )

    def _workers(self) -> list[int]:
        """Return the processes in which ingresses try grammars."""
        found = []
        for pid in self.target.app.ingresses():
            with contextlib.suppress(psutil.Error):
                found += [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return found
