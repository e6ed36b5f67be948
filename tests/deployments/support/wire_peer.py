"""Bare ends of the wire: a peer that sends arbitrary messages to a replica's socket; a replica without engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import zmq

from deployments.config.settings import WireSettings
from deployments.wire import messages
from deployments.wire.handshake import Keys, prove
from deployments.wire.prefix_feed import PrefixSource
from deployments.wire.server import WireServer, WireTimings
from engine.values.sampling_params import SamplingParams
from router.addresses import ReplicaAddress

_numbers = itertools.count(1)


Peer = Callable[[], "BarePeer"]
"""Connects a further ingress."""


class BarePeer:
    """A DEALER socket with an ingress's key that sends and receives single messages."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        server: WireServer,
        identity: bytes | None = None,
        **wrong: Any,
    ) -> None:
        """Connect, under a ZeroMQ identity of one's own or one that is drawn.

        `wrong` are fields of the server's address that the peer has otherwise.
        """
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        address = replace(address_of(server), **wrong)
        prove(self.socket, address.secret, address.public_key)
        if identity is not None:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(address.endpoint)

    def send(self, message: Any) -> None:
        self.socket.send(message if isinstance(message, bytes) else messages.encode(message))

    def ask_for_part(self, message: messages.Resync | messages.NextPart) -> messages.PrefixSnapshot:
        """Ask for a part of a snapshot, and wait for it."""
        self.send(message)
        part: messages.PrefixSnapshot = self.receive(messages.PrefixSnapshot)
        return part

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
            self.server.open(request, ingress_id)
            self.server.accept(request.request_id)
        else:
            self.server.refuse(ingress_id, request.request_id, "queue_full", "no room", 2.5)

    def on_abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def on_withdrawn(self, ingress_id: str, request_id: str) -> None:
        self.withdrawn.append((ingress_id, request_id))


def address_of(server: WireServer) -> ReplicaAddress:
    """Return the address that a replica with this server would publish."""
    return ReplicaAddress(server.replica, server.endpoint, server.secret, server.epoch, server.public_key)


def impostor(context: zmq.Context[zmq.Socket[bytes]], epoch: int | None = None) -> tuple[Any, ReplicaAddress]:
    """Return a socket at which a test speaks as a replica, to whoever connects, and its address."""
    keys = Keys.drawn()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    secret, public = keys.ingress_secret.decode(), keys.public.decode()
    return socket, ReplicaAddress("r0", f"tcp://127.0.0.1:{port}", secret, epoch, public)


def served(
    handler: Requests,
    timings: WireTimings,
    prefixes: PrefixSource | None = None,
    block_tokens: int = 0,
    model: str = "",
    load: Callable[[], messages.Load] = messages.Load,
    **settings: Any,
) -> WireServer:
    """Return a server that has started; `settings` are the wire's."""
    wire = WireSettings(**settings)
    made = WireServer("127.0.0.1", "r0", load, handler, timings, prefixes, block_tokens, model, wire)
    handler.server = made
    made.start()
    return made


def ask(request_id: str, number: int = 1, prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> messages.Generate:
    return messages.Generate(number, request_id, messages.pack_tokens(prompt), SamplingParams(), **fields)


def hello(ingress: str = "i", **received: int) -> messages.Hello:
    return messages.Hello(messages.WIRE_VERSION, next(_numbers), ingress, "", received)


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
