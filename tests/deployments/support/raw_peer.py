"""A peer that speaks ZeroMQ's protocol (ZMTP 3.0) by hand, for what no socket of ZeroMQ would send."""

from __future__ import annotations

import socket
import struct

from deployments.wire.server import WireServer
from router.addresses import KVAddress

GREETING_BYTES = 64
COMMAND, MORE = 4, 1


def connect(server: WireServer | KVAddress) -> socket.socket:
    """Return a connection to a server's port on which nothing was said."""
    host, port = server.endpoint.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=60)


def greeting(mechanism: bytes) -> bytes:
    """Return the first bytes of a peer, which name its mechanism."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def frame(flags: int, body: bytes) -> bytes:
    """Return a part of a message, or a command."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body


def ready(name: bytes) -> bytes:
    """Return a command that says that this peer is a DEALER."""
    socket_type = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return frame(COMMAND, bytes([len(name)]) + name + socket_type)


def receive(peer: socket.socket, size: int) -> bytes:
    """Read so many bytes. Raises ConnectionError when the connection ends before."""
    data = b""
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


def admitted(server: WireServer | KVAddress) -> socket.socket:
    """Return a connection that has shown the ingresses' key to a server without encryption."""
    peer = connect(server)
    peer.sendall(greeting(b"PLAIN"))
    receive(peer, GREETING_BYTES)
    shown = [b"ingress", server.secret.encode()]
    peer.sendall(frame(COMMAND, b"\x05HELLO" + b"".join(bytes([len(text)]) + text for text in shown)))
    _receive_command(peer)
    peer.sendall(ready(b"INITIATE"))
    _receive_command(peer)
    return peer


def _receive_command(peer: socket.socket) -> bytes:
    flags, size = receive(peer, 2)
    assert flags == COMMAND
    return receive(peer, size)


def wait_for_end(peer: socket.socket) -> None:
    """Read until the server has ended the connection."""
    try:
        while peer.recv(65536):
            pass
    except ConnectionError:
        pass
