"""Records the work of a step once for each number of rows, and replays it: one launch for all of its kernels."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

_SIZES = (1, 2, 4, *range(8, 257, 8))
"""Possible numbers of rows of graphs; a step takes the next larger one."""


class Capture(Protocol):
    """A way to record work on the device."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats `work` on the same tensors whenever called. `work` has run before."""
        ...


class CudaCapture:
    """CUDA graphs that share one memory pool: only one of them runs at a time, so all use that of the largest."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Implement `Capture`. Other threads may continue to use the device, except for this stream."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


class StepGraphs:
    """The recorded graphs of one kind of step, by number of rows."""

    def __init__(self, sizes: Sequence[int], work: Callable[[int], None], capture: Capture) -> None:
        """work: computes the given number of leading rows, on tensors whose addresses never change."""
        self.sizes = sizes
        self._work, self._capture = work, capture
        self._replays: dict[int, Callable[[], None]] = {}
        self._unrecorded: dict[int, RuntimeError] = {}

    def size_for(self, count: int) -> int | None:
        """Return the number of rows of the graph for a step of `count` rows; None if no graph is large enough."""
        at = bisect.bisect_left(self.sizes, count)
        return self.sizes[at] if at < len(self.sizes) else None

    def capture_all(self) -> None:
        """Record all sizes, the largest first, so that the others find the memory they need in the pool.

        A size that cannot be recorded is computed without a graph from then on. All sizes are computed in any
        case, as other ranks compute them too. Raises torch.OutOfMemoryError.
        """
        for size in reversed(self.sizes):
            self._work(size)
            self._try_to_record(size)
            if isinstance(error := self._unrecorded.get(size), torch.OutOfMemoryError):
                raise error

    def run(self, size: int) -> bool:
        """Compute a step of `size` rows, and return whether a graph was replayed. A new size is computed first and
        recorded afterwards.
        """
        if (replay := self._replays.get(size)) is not None:
            replay()
            return True
        self._work(size)
        if size not in self._unrecorded:
            self._try_to_record(size)
        return False

    def _try_to_record(self, size: int) -> None:
        try:
            self._replays[size] = self._capture(lambda: self._work(size))
        except RuntimeError as error:  # Running out of memory is one, too.
            if not self._unrecorded:
                logger.warning(
                    "steps of %d rows run without a CUDA graph, as none could be recorded: %s", size, error
                )
            self._unrecorded[size] = error


def sizes_up_to(max_running: int) -> list[int]:
    """Return the graphs' numbers of rows for up to `max_running` requests: the last holds them all, up to 256."""
    last = min(max_running, _SIZES[-1])
    return [size for size in _SIZES if size < last] + [last]
