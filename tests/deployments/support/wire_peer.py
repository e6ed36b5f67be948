"""Bare ends of the wire: a peer that sends arbitrary messages to a replica's socket; a replica without engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq

from deployments.wire import messages
from deployments.wire.server import WireServer, WireTimings
from engine.sampling_params import SamplingParams


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


class Requests:
    """A replica's part of the wire: notes the requests, and opens those that are to be accepted."""

    def __init__(self) -> None:
        self.server: WireServer | None = None
        self.asked: list[messages.Generate] = []
        self.aborted: list[str] = []
        self.withdrawn: list[tuple[str, str]] = []
        self.accepts = True

    def on_generate(self, ingress_id: str, request: messages.Generate) -> None:
        assert self.server is not None
        self.asked.append(request)
        if self.accepts:
            self.server.open(request.request_id, ingress_id)
            self.server.accept(request.request_id)
        else:
            self.server.refuse(ingress_id, request.request_id, "queue_full", "no room", 2.5)

    def on_abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def on_withdrawn(self, ingress_id: str, request_id: str) -> None:
        self.withdrawn.append((ingress_id, request_id))


def served(handler: Requests, timings: WireTimings, *args: Any) -> WireServer:
    """Return a server that has started."""
    made = WireServer("127.0.0.1", "r0", messages.Load, handler, timings, *args)
    handler.server = made
    made.start()
    return made


def ask(request_id: str, number: int = 1, **fields: Any) -> messages.Generate:
    return messages.Generate(number, request_id, messages.pack_tokens([1, 2, 3]), SamplingParams(), **fields)


def hello(server: WireServer, ingress: str = "i", **received: int) -> messages.Hello:
    return messages.Hello(messages.WIRE_VERSION, server.secret, time.time_ns(), ingress, "", received)


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
