"""Counts what Python does in a call, which no other process changes: a cost without a clock."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def count_calls(work: Callable[[], object]) -> int:
    """Return how many functions `work` calls, and they in turn, those written in C included.

    What loops in C, such as a copy of a dictionary, is one call; what loops in Python and calls nothing is none.
    No garbage is collected meanwhile: its callbacks would count.
    """
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    was_collecting = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        if was_collecting:
            gc.enable()
    return count
