"""Timing work on a device: as a step calls it, or recorded in a CUDA graph, with no Python between kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

_RECORDED_CALLS = 20
"""Calls in a graph, at least."""
_MOST_COPIES = 64


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, *, tries: int = 5, calls: int = 10) -> float:
    """Return seconds of one call, launches by the host included: the best of a few tries of several calls.

    On a CPU it is one call, as there are no launches to hide, and nobody compares its time.
    """
    tries, calls = (tries, calls) if device.type == "cuda" else (1, 1)
    work()
    best = float("inf")
    for _ in range(tries):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(device)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def num_copies(num_bytes: float, device: torch.device) -> int:
    """Return how many buffers of so many bytes are more than twice what the device's cache holds."""
    if device.type != "cuda":
        return 1
    cached = int(torch.cuda.get_device_properties(device).L2_cache_size)
    return max(1, min(_MOST_COPIES, 1 + int(2 * cached // max(num_bytes, 1))))


def recorded_seconds_of(works: Sequence[Callable[[], object]], device: torch.device, *, tries: int = 5) -> float:
    """Return the device's seconds for one call: the best of a few replays of a graph of many calls.

    works: the same work on buffers of their own, called in turn, so that none finds its data in the cache. On a
    CPU the first one is timed alone. Raises RuntimeError where the work cannot be recorded.
    """
    if device.type != "cuda":
        return seconds_of(works[0], device, tries=tries)
    count = max(_RECORDED_CALLS, len(works))
    with torch.cuda.device(device):
        for work in works:  # What compiles or allocates for itself does so here.
            work()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(count):
                works[call % len(works)]()
        graph.replay()
        best = float("inf")
        for _ in range(tries):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, float(begin.elapsed_time(end)) / 1e3 / count)
    return best
