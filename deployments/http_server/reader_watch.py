"""Ends a connection whose client reads too slowly.

A transport closes only when all has been sent, so a client that reads nothing, or a byte now and then, could keep
its connection, and the memory of its answer, without end, even after the answer is complete or the request is
aborted. A client without unread bytes is not watched.

    begin ├─ unread_s ─┤ enough was read? ├─ unread_s ─┤ ... until all was read, or the connection is ended
"""

from __future__ import annotations

import asyncio
from functools import partial

from deployments.http_server.gathered_writes import GatheredWrites
from deployments.wire.deadlines.deadline import Deadline


class ReaderWatch:
    """Watches one connection's client from `begin` until it has read everything."""

    def __init__(
        self, writes: GatheredWrites, loop: asyncio.AbstractEventLoop, unread_s: float, min_bytes_per_s: float
    ) -> None:
        """In each `unread_s` in which something waits for it, a client has to read `min_bytes_per_s` on average,
        and at least one byte.
        """
        self._writes, self._unread_s = writes, unread_s
        self._enough = max(1.0, unread_s * min_bytes_per_s)
        self._deadline, self._is_watching = Deadline(loop), False

    def begin(self) -> None:
        """Begin to watch, if anything is unread. Idempotent."""
        if not self._is_watching and self._writes.num_unsent:
            self._is_watching = True
            self._deadline.set(self._unread_s, partial(self._look, self._writes.num_sent))

    def stop(self) -> None:
        """Watch no more: everything was read, or the connection has ended. Idempotent."""
        if self._is_watching:
            self._is_watching = False
            self._deadline.cancel()

    def _look(self, num_sent_before: int) -> None:
        self._is_watching = False
        if self._writes.num_unsent and self._writes.num_sent - num_sent_before < self._enough:
            self._writes.abort()
        else:
            self.begin()
