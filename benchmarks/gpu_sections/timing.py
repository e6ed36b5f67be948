"""Timing work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, *, tries: int = 5, calls: int = 10) -> float:
    """Return seconds of one call: the best of a few tries of several calls, which hide launches as in a step.

    On a CPU, each try is one call, as there are no launches to hide.
    """
    calls = calls if device.type == "cuda" else 1
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
