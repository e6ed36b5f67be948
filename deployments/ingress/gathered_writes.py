"""Gathers what is written to a connection in one turn of the event loop into one write.

    turn n     head, events, end of the answer      turn n + 1     one system call, and one wake-up of the client

uvicorn writes each of the three by itself, and writing is what costs most about a short answer.
"""

from __future__ import annotations

import asyncio
from typing import Any


class GatheredWrites:
    """A transport that writes once in each turn. Everything but `write` and `close` is the transport's own."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._gathered: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Write with all else that this turn writes."""
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.append(data)

    def close(self) -> None:
        """Write what was gathered and close the connection."""
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered and not self._transport.is_closing():
            self._transport.write(gathered[0] if len(gathered) == 1 else b"".join(gathered))
