"""Garbage collection in a serving process: it skips objects from the process's start, and counts the pauses.

A collection stops all threads while it looks at every object of its generation. A process that has imported torch
or Ray has several hundred thousand objects, none of which is garbage, so a full collection would take a tenth of a
second. They are frozen once the process is ready. Most objects of a request are freed with the last reference to
them; the rest (cycles in exceptions and tasks) die young.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from typing import Any

from engine.base.huge_pages import collapse_memory
from monitoring.metrics import Metrics

YOUNG = (1_000, 5)
"""Objects gained before a collection of the young ones, and how many of these precede one of the older ones: a
thousand objects take a tenth of a millisecond, five thousand less than one."""
RARE = 2_000
"""Collections of older objects before a full one in an engine: surviving objects are mostly the tree of cached
prefixes, which can have millions of objects and no garbage. Python also waits until there are a quarter more."""
OFTEN = 20
"""The same in an ingress, after 100,000 objects gained: it keeps little for long, so a full collection takes
milliseconds, and a connection's objects refer to each other."""
_MAX_PENDING = 10_000
"""Pauses kept for the next report; older ones are forgotten."""


class GarbagePauses:
    """Measures this process's collections from its construction to `close`."""

    def __init__(self) -> None:
        self._began = 0.0
        # A collection may begin while its thread holds any lock, so the callback takes none, and `report` counts.
        self._pauses: deque[tuple[int, float]] = deque(maxlen=_MAX_PENDING)
        gc.callbacks.append(self._on_collection)

    def settle(self, full: int = RARE) -> None:
        """Collect the garbage of the start, freeze the rest and keep it in large pages. Call it when the process
        is ready to serve. A full collection comes after `full` of older objects.
        """
        gc.collect()
        gc.freeze()
        gc.set_threshold(*YOUNG, full)
        collapse_memory()

    def report(self, metrics: Metrics) -> None:
        """Observe the pauses since the last call."""
        for generation, seconds in self.drain():
            metrics.observe("gc_pause_seconds", seconds, generation=str(generation))

    def drain(self) -> list[tuple[int, float]]:
        """Return the (generation, seconds) of each pause since the last call."""
        return [self._pauses.popleft() for _ in range(len(self._pauses))]

    def close(self) -> None:
        """Stop measuring. Idempotent."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._pauses.append((info["generation"], time.perf_counter() - self._began))
