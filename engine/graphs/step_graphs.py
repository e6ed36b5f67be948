"""Records the work of a step once for each number of rows, and replays it: one launch for all of its kernels."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

_SIZES = (1, 2, 4, *range(8, 257, 8))
"""Possible numbers of rows of graphs; a step takes the next larger one."""
_CONTEXTS = (1024, 8192)
"""Lengths for which rows have separate graphs, if the launch of attention depends on the longest row."""
_MOST_SPLIT_ROWS = 32
"""Number of rows that keep a GPU busy without splitting any row's KV, so that lengths no longer matter."""


class Capture(Protocol):
    """A way to record work on the device."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats `work` on the same tensors whenever called. `work` has run before."""


class CutCapture(Capture, Protocol):
    """A way to record work in pieces."""

    def cut(self, outside: Callable[[], None]) -> None:
        """End a piece of the work that is being recorded: repetitions of the work call `outside` there. If nothing
        is being recorded, call it now.
        """


class CudaCapture:
    """CUDA graphs that share one memory pool: only one of them runs at a time, so all use that of the largest."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None  # being recorded
        self._pieces: list[Callable[[], None]] = []

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Implement `Capture`. Other threads may continue to use the device, except for this stream."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        pieces: list[Callable[[], None]] = []
        self._pieces = pieces
        with torch.cuda.stream(self._stream):
            self._begin()
            try:
                work()
            finally:
                self._end()
        return pieces[0] if len(pieces) == 1 else partial(_call_all, pieces)

    def cut(self, outside: Callable[[], None]) -> None:
        """Implement `CutCapture`."""
        if self._graph is None:
            outside()
            return
        self._end()
        self._pieces.append(outside)
        self._begin()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:  # Ending a piece may have failed already.
            graph.capture_end()
            self._pieces.append(graph.replay)


def _call_all(pieces: Sequence[Callable[[], None]]) -> None:
    for piece in pieces:
        piece()


class StepGraphs(Generic[K]):
    """The recorded graphs of one kind of step, by size."""

    def __init__(self, sizes: Sequence[K], work: Callable[[K], None], capture: Capture) -> None:
        """work: computes a step of the given size, on tensors whose addresses never change. The largest size is
        the last.
        """
        self.sizes = sizes
        self._work, self._capture = work, capture
        self._replays: dict[K, Callable[[], None]] = {}
        self._unrecorded: dict[K, RuntimeError] = {}

    @property
    def num_graphs(self) -> int:
        """Number of sizes."""
        return len(self.sizes)

    def capture_all(self) -> None:
        """Record all sizes, the largest first, so that the others find the memory they need in the pool.

        A size that cannot be recorded is computed without a graph from then on. All sizes are always computed,
        because other ranks compute them too. Raises torch.OutOfMemoryError.
        """
        for size in reversed(self.sizes):
            self._work(size)
            self._try_to_record(size)
            if isinstance(error := self._unrecorded.get(size), torch.OutOfMemoryError):
                raise error

    def run(self, size: K) -> bool:
        """Compute a step of this size, and return whether a graph was replayed. A new size is computed and then
        recorded.
        """
        if (replay := self._replays.get(size)) is not None:
            replay()
            return True
        self._work(size)
        if size not in self._unrecorded:
            self._try_to_record(size)
        return False

    def _try_to_record(self, size: K) -> None:
        try:
            self._replays[size] = self._capture(lambda: self._work(size))
        except RuntimeError as error:  # This includes running out of memory.
            if not self._unrecorded:
                logger.warning(
                    "steps of %s rows run without a CUDA graph, because none could be recorded: %s", size, error
                )
            self._unrecorded[size] = error


class DecodeSize(NamedTuple):
    """The size of a graph of decodes."""

    rows: int
    longest: int
    """Most positions of a row."""


class DecodeSizes:
    """The sizes of graphs of decodes, and the choice of one for a step."""

    def __init__(self, rows: Sequence[int], contexts: Sequence[int]) -> None:
        """rows: numbers of rows; contexts: lengths of rows. Both ascend."""
        self.rows, self._contexts = rows, contexts
        self.all = [DecodeSize(count, context) for count in rows for context in self._contexts_of(count)]
        """All of them, ascending."""

    def of(self, rows: int, longest: int) -> DecodeSize | None:
        """Return the smallest size with room for so many rows, of so many positions; None if there is none."""
        count = next_size(self.rows, rows)
        context = None if count is None else next_size(self._contexts_of(count), longest)
        return None if count is None or context is None else DecodeSize(count, context)

    def _contexts_of(self, rows: int) -> Sequence[int]:
        return self._contexts if rows <= _MOST_SPLIT_ROWS else self._contexts[-1:]


def next_size(sizes: Sequence[int], count: int) -> int | None:
    """Return the smallest of ascending sizes that is at least `count`; None if there is none."""
    at = bisect.bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None


def contexts_up_to(max_len: int, *, is_planned: bool) -> list[int]:
    """Return the lengths of rows for which separate graphs are recorded; the last is `max_len`. `is_planned`:
    whether the launch of attention depends on them (`AttentionBackend.plans_by_bounds`).
    """
    return [length for length in _CONTEXTS if is_planned and length < max_len] + [max_len]


def sizes_up_to(max_running: int) -> list[int]:
    """Return the graphs' numbers of rows for up to `max_running` requests: the last holds them all, up to 256."""
    last = min(max_running, _SIZES[-1])
    return [size for size in _SIZES if size < last] + [last]
