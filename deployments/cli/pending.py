"""Shows what a start waits for, and for how long: updated in place on a terminal, a line now and then in a log.

engines: 1 of 2 ready, 6 s
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console

LOG_EVERY_S = 5.0
"""Seconds after which a log repeats a line."""
_TICK_S = 0.5
_HUB, _INGRESS = "MetricsHub", "Ingress"
_RUNNING, _LEAVING = "RUNNING", ("STOPPING", "STOPPED")


class Pending:
    """Shows the last task that it was given, with the seconds since its start, until it is left."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is in seconds."""
        self._console, self._clock, self._started = console, clock, clock()
        self._what, self._logged_at = "", self._started
        self._status = console.status("") if console.is_terminal else None
        self._left = threading.Event()
        self._lock = threading.Lock()
        # Ray starts in calls that take seconds; the thread shows the time meanwhile.
        self._thread = threading.Thread(target=self._keep_ticking, name="pending", daemon=True)

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()
        if self._status is not None:
            self._status.stop()

    def on(self, what: str) -> None:
        """Show from now on that the start waits for `what`."""
        with self._lock:
            if what != self._what:
                self._what = what
                self._show()

    def tick(self) -> None:
        """Show how long it has been."""
        with self._lock:
            if self._what and (self._status is not None or self._clock() - self._logged_at >= LOG_EVERY_S):
                self._show()

    def _show(self) -> None:
        now = self._clock()
        line = f"{self._what}, {now - self._started:.0f} s"
        if self._status is not None:
            self._status.update(line)
        else:
            self._logged_at = now
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _keep_ticking(self) -> None:
        while not self._left.wait(_TICK_S):
            self.tick()


def waited_for(applications: Mapping[str, Any], names: Iterable[str], own: Iterable[str]) -> str:
    """Return what these applications still lack, by Serve's statuses by name.

    Deployments of Raydix's `own` applications have the names that its documentation uses.
    """
    for name in names:
        if name not in applications or not any(
            overview.replica_states for overview in applications[name].deployments.values()
        ):
            return f"{name}: being built"
    ours = frozenset(own)
    counts: dict[str, tuple[int, int]] = {}
    for name in names:
        for deployment, overview in applications[name].deployments.items():
            part = _part(deployment) if name in ours else f"{name}'s {deployment}"
            states = {
                str(getattr(state, "value", state)): count for state, count in overview.replica_states.items()
            }
            num_wanted = sum(count for state, count in states.items() if state not in _LEAVING)
            num_ready, num_all = counts.get(part, (0, 0))
            counts[part] = (num_ready + states.get(_RUNNING, 0), num_all + num_wanted)
    lacking = [f"{part}: {ready} of {wanted} ready" for part, (ready, wanted) in counts.items() if ready < wanted]
    return "; ".join(sorted(lacking)) or "the API: no healthy answer yet"


def _part(deployment: str) -> str:
    return {_INGRESS: "ingresses", _HUB: "hub"}.get(deployment, "engines")
