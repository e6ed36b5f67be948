"""Receives a replica's messages one by one, and ends connections whose messages have several parts.

An ingress's message has one part, before which ZeroMQ puts the sender's identity. A message with more is not from
an ingress, and may have millions of parts: they are dropped one at a time, so that each counts for a turn's limit.
"""

from __future__ import annotations

from typing import NamedTuple

import zmq

from deployments.wire.handshake import Socket
from deployments.wire.peers import Peers
from deployments.wire.sockets import is_readable

_SRCFD = int(zmq.SRCFD)


class Received(NamedTuple):
    """A message, or a part of one that is dropped."""

    identity: bytes
    """ZeroMQ's identity of the sender's connection; empty for a part after the first."""
    data: bytes | None
    """None for a part of several."""
    size: int
    """Its bytes."""


class Receiver:
    """Reads a ROUTER socket. Not thread-safe: its owner holds the socket's lock."""

    def __init__(self, socket: Socket, peers: Peers) -> None:
        self._socket, self._peers = socket, peers
        self._is_dropping = False  # whether the next part belongs to a message of several

    def receive(self) -> Received | None:
        """Return the next message; None when none has arrived."""
        if not is_readable(self._socket):
            return None
        if self._is_dropping:
            return self._drop()
        identity = self._socket.recv(zmq.NOBLOCK)
        part = self._socket.recv(zmq.NOBLOCK, copy=False)
        connection = int(part.get(_SRCFD))
        self._peers.heard(connection)
        if not part.more:
            return Received(identity, part.bytes, len(part))
        self._is_dropping = True
        self._peers.cut(connection)
        return Received(identity, None, len(part))

    def _drop(self) -> Received:
        part = self._socket.recv(zmq.NOBLOCK, copy=False)
        self._is_dropping = part.more
        return Received(b"", None, len(part))
