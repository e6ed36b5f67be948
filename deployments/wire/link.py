"""The link between an ingress and one replica. It carries encoded messages in order, and may lose some."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import zmq

from deployments.wire.handshake import Context
from deployments.wire.sockets import MAX_REQUEST_BYTES, connect_dealer, descriptor, is_readable
from router.addresses import ReplicaAddress


class Link(Protocol):
    """Sends and receives without waiting. Lives on one event loop."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        ...

    def send(self, data: bytes) -> bool:
        """Send a message. Return False when that is impossible now, because the replica does not read messages.

        Raises ValueError for a message that is too large.
        """
        ...

    def receive(self) -> bytes | None:
        """Return the next message that has arrived; None when there is none, and after `close`."""
        ...

    def reconnect(self) -> None:
        """Connect again under a new identity. Messages that are on their way may be lost."""
        ...

    def close(self) -> None:
        """Disconnect. Idempotent."""
        ...


OpenLink = Callable[[Context, ReplicaAddress, Callable[[], None]], Link]
"""Opens a link to a replica. The link calls the function whenever messages may have arrived; it must then receive
until there are none, or arrange to be called again."""


class DealerLink:
    """A link over a ZeroMQ DEALER socket, which the event loop watches."""

    def __init__(self, context: Context, address: ReplicaAddress, on_readable: Callable[[], None]) -> None:
        self._context, self._address, self._on_readable = context, address, on_readable
        self._loop = asyncio.get_running_loop()
        self._connect()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._socket.closed

    def send(self, data: bytes) -> bool:
        """Send a message, see `Link`."""
        if len(data) > MAX_REQUEST_BYTES:
            raise ValueError(f"the message has {len(data)} bytes, at most {MAX_REQUEST_BYTES} are allowed")
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            # Sending may consume the signal that a message has arrived.
            self._loop.call_soon(self._on_readable)
        return True

    def receive(self) -> bytes | None:
        """Return the next message, see `Link`."""
        try:
            return self._socket.recv(zmq.NOBLOCK) if is_readable(self._socket) else None
        except zmq.Again:
            return None

    def reconnect(self) -> None:
        """Connect under a new identity."""
        self._disconnect(linger_ms=0)
        self._connect()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        if not self._socket.closed:
            self._disconnect(linger_ms=200)

    def _connect(self) -> None:
        self._socket = connect_dealer(self._context, self._address)
        self._fd = descriptor(self._socket)
        self._loop.add_reader(self._fd, self._on_readable)

    def _disconnect(self, linger_ms: int) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=linger_ms)
