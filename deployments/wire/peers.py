"""A replica's TCP connections: failed handshakes are counted, and connections with endless messages are closed.

ZeroMQ bounds each part of a message (MAXMSGSIZE) and how many messages wait (RCVHWM), but not how many parts a
message has, and it delivers none of them before the last has come. So an endless message is visible only
from outside: the kernel counts more bytes from a connection than could wait in messages, and none was received.
"""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import struct
from collections import Counter
from collections.abc import Iterator

import zmq

from deployments.wire.handshake import Socket
from deployments.wire.sockets import MAX_REQUEST_BYTES, MAX_WAITING

MAX_UNFINISHED_BYTES = (MAX_WAITING + 2) * MAX_REQUEST_BYTES
"""Most bytes from a connection after the last message received from it: all that can wait, and one more."""
CHECK_S = 0.1
"""Seconds between two looks at the connections."""

_ACCEPTED, _ENDED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)
_FAILED = (
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    | int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    | int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
)
_EVENTS_PER_TURN = 1000
_EVENT = struct.Struct("=HI")
_TCP_INFO: int | None = getattr(sockets, "TCP_INFO", None)
"""The socket option; None where the system has none, so that endless messages are not noticed."""
_RECEIVED_AT = 128  # offset of tcpi_bytes_received, u64, in Linux's struct tcp_info


class Peers:
    """The connections to one ROUTER socket, by file descriptor. Belongs to the wire's thread."""

    def __init__(self, socket: Socket, counts: Counter[str], max_unfinished_bytes: int | None = None) -> None:
        """Watch a socket that is not bound yet; `counts` counts "handshake" and "endless"."""
        self._max_unfinished = max_unfinished_bytes or MAX_UNFINISHED_BYTES
        self._events: Socket = socket.get_monitor_socket(_ACCEPTED | _ENDED | _FAILED)
        self._router, self._counts = socket, counts
        self.port = 0
        """Port of the socket. Set it once it is bound."""
        self._received: dict[int, int] = {}  # connection -> bytes received from it up to its last message
        self._heard: set[int] = set()  # connections with a message since the last look
        self._look_at = 0.0

    @property
    def socket(self) -> Socket:
        """The socket on which ZeroMQ reports; call `look` when it is readable."""
        return self._events

    def heard(self, connection: int) -> None:
        """Note that a message was received from a connection."""
        self._heard.add(connection)

    def look(self, now: float) -> None:
        """Note which connections began and ended; now and then, close those with endless messages."""
        for event, connection in self._news():
            if event & _FAILED:
                self._counts["handshake"] += 1
            elif event == _ACCEPTED:
                self._received[connection] = 0
            else:
                self._received.pop(connection, None)
        if now < self._look_at:
            return
        self._look_at = now + CHECK_S
        for connection, before in list(self._received.items()):
            received = self._bytes_received(connection)
            if connection in self._heard:
                self._received[connection] = received
            elif received - before > self._max_unfinished:
                self._counts["endless"] += 1
                del self._received[connection]
                self.cut(connection)
        self._heard.clear()

    def cut(self, connection: int) -> None:
        """End a connection; ZeroMQ then drops its part of an unfinished message."""
        with contextlib.suppress(OSError), self._duplicate(connection) as ours:
            # ZeroMQ closes it then; without the option, a peer that waits for room to send would notice it late.
            ours.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))
            ours.shutdown(sockets.SHUT_RDWR)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if not self._events.closed:
            self._router.disable_monitor()
            self._events.close()

    def _news(self) -> Iterator[tuple[int, int]]:
        """Yield ZeroMQ's reports: an event, and the connection if the event has one."""
        for _ in range(_EVENTS_PER_TURN):
            try:
                data, _endpoint = self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield _EVENT.unpack(data)

    def _bytes_received(self, connection: int) -> int:
        """Return how many bytes the kernel has received from a connection; 0 if it is unknown."""
        if _TCP_INFO is None:
            return 0
        with contextlib.suppress(OSError), self._duplicate(connection) as ours:
            info = ours.getsockopt(sockets.IPPROTO_TCP, _TCP_INFO, 256)
            if len(info) >= _RECEIVED_AT + 8:
                return int(struct.unpack_from("=Q", info, _RECEIVED_AT)[0])
        return 0

    @contextlib.contextmanager
    def _duplicate(self, connection: int) -> Iterator[sockets.socket]:
        """Hold a connection, so that its descriptor is not reused meanwhile. Raises OSError.

        ZeroMQ may have just closed it, and the descriptor may belong to any other file or connection.
        """
        with sockets.socket(fileno=os.dup(connection)) as ours:
            if ours.getsockname()[1] != self.port:
                raise OSError("not a connection to the wire")
            yield ours
