"""Recording the work of a step once for each number of rows, and replaying it: a launch for all of its kernels."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

_SIZES = (1, 2, 4, *range(8, 257, 8))
"""Rows of the graphs there may be; a step takes the next larger one."""


class Capture(Protocol):
    """A way to record work."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """What does the same as `work`, on the same tensors, each time it is called. `work` has run before."""
        ...


class CudaCapture:
    """CUDA graphs in one pool of memory: as only one of them runs at a time, all use that of the largest."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Implement `Capture`. Other threads may go on to use the device, but for this stream."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


class StepGraphs:
    """The recordings of one kind of step."""

    def __init__(self, sizes: Sequence[int], work: Callable[[int], None], capture: Capture) -> None:
        """work: computes the first rows, as many as it is told, on tensors that stay where they are."""
        self.sizes = sizes
        self._work, self._capture = work, capture
        self._replays: dict[int, Callable[[], None]] = {}
        self._unrecorded: set[int] = set()

    def size_for(self, count: int) -> int | None:
        """Rows of the graph for a step of `count`; None where there is none so large."""
        at = bisect.bisect_left(self.sizes, count)
        return self.sizes[at] if at < len(self.sizes) else None

    def capture_all(self) -> None:
        """Record all sizes, the largest first, so that the others find all the memory they need in its pool."""
        for size in reversed(self.sizes):
            self._work(size)
            self._record(size)

    def run(self, size: int) -> bool:
        """Compute a step of that many rows. A size that comes for the first time is computed, and then recorded;
        returns whether it was replayed.
        """
        if (replay := self._replays.get(size)) is not None:
            replay()
            return True
        self._work(size)
        if size not in self._unrecorded:
            try:
                self._record(size)
            except RuntimeError as error:  # that there is no memory left is one
                logger.warning(
                    "steps of %d rows run without a CUDA graph, as none could be recorded: %s", size, error
                )
                self._unrecorded.add(size)
        return False

    def _record(self, size: int) -> None:
        self._replays[size] = self._capture(lambda: self._work(size))


def sizes_up_to(max_running: int) -> list[int]:
    """Rows of the graphs for batches of up to `max_running` requests: the last one holds them all, up to 256."""
    last = min(max_running, _SIZES[-1])
    return [size for size in _SIZES if size < last] + [last]
