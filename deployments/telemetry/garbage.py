"""Garbage collection in a process that serves: what its start left is not looked at again, and pauses are counted.

A collection stops all threads for as long as it takes to look at every object of its generation. A process that
has imported torch or Ray has several hundred thousand objects, none of which is garbage, so a full collection
would take a tenth of a second. They are frozen once the process is ready. Most objects that a request makes are
freed when the last reference to them goes; the rest (cycles in exceptions and tasks) die young.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from typing import Any

from engine.huge_pages import collapse_memory
from monitoring.metrics import Metrics

THRESHOLDS = (1_000, 5, 2_000)
"""Objects gained before a collection of the young ones, and how many of these precede each of an older generation.

A thousand objects take a tenth of a millisecond, five thousand less than one. What outlives these is mostly the
tree of cached prefixes, which can have millions of objects and no garbage, so a full collection is rare: it comes
when ten million objects were gained, and only if there are then a quarter more than after the one before.
"""
_MAX_PENDING = 10_000
"""Pauses kept for the next report; older ones are forgotten."""


class GarbagePauses:
    """Measures this process's collections from its construction to `close`."""

    def __init__(self) -> None:
        self._began = 0.0
        # A collection may begin while its thread holds any lock, so it takes none: `report` does the counting.
        self._pauses: deque[tuple[int, float]] = deque(maxlen=_MAX_PENDING)
        gc.callbacks.append(self._on_collection)

    def settle(self) -> None:
        """Collect what the start has left, freeze the rest and keep it in large pages. Call it when the process is
        ready to serve.
        """
        gc.collect()
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
        collapse_memory()

    def report(self, metrics: Metrics) -> None:
        """Observe the pauses since the last call."""
        for generation, seconds in self.drain():
            metrics.observe("gc_pause_seconds", seconds, generation=str(generation))

    def drain(self) -> list[tuple[int, float]]:
        """Return the (generation, seconds) of each pause since the last call."""
        return [self._pauses.popleft() for _ in range(len(self._pauses))]

    def close(self) -> None:
        """Measure no more. Idempotent."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._pauses.append((info["generation"], time.perf_counter() - self._began))
