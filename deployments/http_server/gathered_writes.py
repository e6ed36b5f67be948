"""Gathers all writes to a connection in one turn of the event loop into one.

    turn n     head, events, end of the answer      turn n + 1     one system call, and one wake-up of the client

uvicorn writes each of the three separately, and writing is the largest cost of a short answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class GatheredWrites:
    """A transport that writes once in each turn. All else is the transport's own."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, may_close: Callable[[], bool]
    ) -> None:
        """`may_close` is asked when the connection is to be closed, which it is once all has been sent. Where it
        returns False, the connection stays open.
        """
        self._transport, self._loop, self._may_close = transport, loop, may_close
        self._gathered: list[bytes] = []
        self._num_written = 0

    @property
    def num_unsent(self) -> int:
        """Number of bytes that wait for the client to read."""
        return int(self._transport.get_write_buffer_size())

    @property
    def num_sent(self) -> int:
        """Number of bytes that the kernel has taken."""
        return self._num_written - self.num_unsent

    def forget(self) -> None:
        """Never ask `may_close` again, because the connection has ended."""
        self._may_close = lambda: True

    def write(self, data: bytes) -> None:
        """Write with all else that this turn writes."""
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.append(data)

    def close(self) -> None:
        """Write the gathered bytes and close the connection."""
        self._flush()
        if self._may_close():
            self._transport.close()

    def write_eof(self) -> None:
        """Write the gathered bytes and end this direction of the connection."""
        self._flush()
        self._transport.write_eof()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered and not self._transport.is_closing():
            data = gathered[0] if len(gathered) == 1 else b"".join(gathered)
            self._num_written += len(data)
            self._transport.write(data)
