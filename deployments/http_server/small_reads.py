"""Reads what clients send in small pieces, so that a waiting connection holds little.

    socket ──▶ one buffer of the server, READ_BYTES ──▶ a connection, which parses it or keeps a copy

An event loop hands a plain protocol up to 256 KiB per read. Hundreds of clients could make the server hold as much
for each of them.
"""

from __future__ import annotations

import asyncio

READ_BYTES = 2**15
"""Most bytes that a connection receives per read."""


class SmallReads(asyncio.BufferedProtocol):
    """Between one connection's transport and its protocol."""

    def __init__(self, protocol: asyncio.Protocol, buffer: memoryview) -> None:
        """All connections of an event loop may share a buffer, because its bytes are passed on before the next
        read."""
        self._protocol, self._buffer = protocol, buffer

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Hand on the bytes that were read."""
        self._protocol.data_received(bytes(self._buffer[:nbytes]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hand on."""
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Hand on."""
        self._protocol.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """Hand on."""
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Hand on."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Hand on."""
        self._protocol.resume_writing()
