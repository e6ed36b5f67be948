"""A bare peer that sends arbitrary messages to a replica's socket, with the right secret or without."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq

from deployments.wire import messages
from deployments.wire.server import WireServer


class BarePeer:
    """A DEALER socket that sends and receives single messages."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes | None = None
    ) -> None:
        """Connect, under a ZeroMQ identity of one's own or one that is drawn."""
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if identity is not None:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(endpoint)

    def send(self, message: Any) -> None:
        self.socket.send(message if isinstance(message, bytes) else messages.encode(message))

    def receive(self, kind: type, timeout: float = 60.0) -> Any:
        """Wait for the next message of a kind. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            message = messages.decode_to_ingress(self.socket.recv())
            if isinstance(message, kind):
                return message
        raise TimeoutError(kind.__name__)


def hello(server: WireServer, ingress: str = "i", **received: int) -> messages.Hello:
    return messages.Hello(messages.WIRE_VERSION, server.secret, time.time_ns(), ingress, "", received)


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
