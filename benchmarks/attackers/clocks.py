"""Clocks that jump: processes that stand still for seconds, and wall clocks that an operator has set.

A process that was stopped finds that the monotonic clock has jumped, as after a pause of its virtual machine. The
wall clocks of engines, ingresses and the hub are moved by an hour (`benchmarks/wall_clock.py`), together or apart.
Serve's controller keeps its own: it looks after replicas at times of the wall clock, so that one which is set back
by an hour replaces nothing that dies in this hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.attackers.base import Attacker, Kind
from benchmarks.siege_app import Outage

HOUR_S = 3600
_LONGEST_STOP_S = 4.0
"""An engine that says nothing for `health.lost_after_s`, which is 3 s, loses its streams to others."""


class Clocks(Attacker):
    """Stops a process for a while, or moves the wall clock."""

    name = "clocks"

    def kinds(self) -> Mapping[str, Kind]:
        """Return a kind for each kind of process, and for each direction of the wall clock."""
        app = self.target.app
        of: dict[str, Callable[[], list[int]]] = {
            "engine": app.engines, "ingress": app.ingresses, "hub": app.hubs, "controller": app.controllers,
        }  # fmt: skip
        stops: dict[str, Kind] = {f"{kind} stopped": partial(self._stop, kind, pids) for kind, pids in of.items()}
        if self.target.clocks is None:
            return stops
        moves = {"forward": [HOUR_S], "back": [-HOUR_S], "apart": [-HOUR_S, 0, HOUR_S]}
        return stops | {f"wall clocks {where}": partial(self._move, by) for where, by in moves.items()}

    async def _stop(self, kind: str, pids: Callable[[], list[int]]) -> None:
        found = await asyncio.to_thread(pids)
        if not found:
            self.counts[f"no {kind} was there"] += 1
            return
        began, pid = time.monotonic(), self.draw.choice(found)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(self.draw.uniform(0.5, _LONGEST_STOP_S))
            finally:
                os.kill(pid, signal.SIGCONT)
        self.target.outages.append(Outage(kind, "stopped", began, time.monotonic()))

    async def _move(self, by: list[int]) -> None:
        """Move each process's clock by one of these numbers of seconds."""
        app, clocks = self.target.app, self.target.clocks
        assert clocks is not None
        for pids in (app.engines, app.ingresses, app.hubs):
            for pid in await asyncio.to_thread(pids):
                clocks.move(pid, self.draw.choice(by))
        await asyncio.sleep(self.draw.uniform(3, 6))
