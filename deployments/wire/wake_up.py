"""Wakes a thread that waits for its sockets, from any other thread."""

from __future__ import annotations

import contextlib
import os


class WakeUp:
    """A pipe next to a thread's sockets, which is readable after the thread was woken."""

    def __init__(self) -> None:
        self.readable, self._writable = os.pipe()
        os.set_blocking(self.readable, False)
        os.set_blocking(self._writable, False)

    def wake(self) -> None:
        """Make the thread's poll return, now or when it begins. Never waits."""
        with contextlib.suppress(BlockingIOError):  # it is awake
            os.write(self._writable, b"\0")

    def clear(self) -> None:
        """Note, in the thread, that it is awake."""
        with contextlib.suppress(BlockingIOError):  # it was not woken
            os.read(self.readable, 4096)

    def close(self) -> None:
        """Close both ends, when no thread wakes this one any more."""
        os.close(self.readable)
        os.close(self._writable)
