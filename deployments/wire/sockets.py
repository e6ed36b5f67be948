"""The wire's ZeroMQ sockets and their options.

A socket's file descriptor signals edges, not levels: after each send and each wake-up the caller must receive
until `is_readable` returns False, or messages stay unnoticed.
"""

from __future__ import annotations

import uuid

import zmq

from deployments.wire.handshake import Context, Doorkeeper, Socket, prove
from deployments.wire.messages import MAX_MESSAGE_BYTES
from router.addresses import KVAddress, ReplicaAddress

MAX_REQUEST_BYTES = 16 * 2**20
"""Largest message of an ingress: a request of four million tokens, or a hello that names streams."""
MAX_WAITING = 8
"""Messages of one ingress that wait in a replica's process; all others wait in TCP and at the ingress."""

_POLLIN = int(zmq.POLLIN)  # converting the enum each time costs more than the query
_EVENTS = int(zmq.EVENTS)


def make_router(
    context: Context,
    doorkeeper: Doorkeeper,
    max_message_bytes: int = MAX_REQUEST_BYTES,
    max_waiting: int = MAX_WAITING,
) -> Socket:
    """Create a replica's socket, to which `doorkeeper` admits its peers. `bind` binds it.

    The last two arguments limit the number of a peer's messages in this process, and the bytes of each.
    """
    socket = _make(context, zmq.ROUTER)
    doorkeeper.guard(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raise when a peer is gone or its pipe is full
    # A peer that was suspended for long reconnects while its old connection still seems to exist.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RCVHWM, max_waiting)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    return socket


def bind(socket: Socket, host: str, ports: tuple[int, int] | None = None) -> tuple[str, int]:
    """Bind a replica's socket to a free port of `host`; return its endpoint and its port.

    `ports` are the lowest and the highest port allowed; None allows any. Raises OSError when none is free.
    """
    address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    port = socket.bind_to_random_port(address) if ports is None else _bind_to_first(socket, address, *ports)
    return f"{address}:{port}", port


def _bind_to_first(socket: Socket, address: str, low: int, high: int) -> int:
    for port in range(low, high + 1):
        try:
            socket.bind(f"{address}:{port}")
            return port
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
    raise OSError(
        f"no port from {low} to {high} is free on {address}: each engine replica of a node takes one, and "
        "one more where replicas fetch KV from each other (engines.kv_fetch); "
        "widen wire.ports, and the firewall rule for it (k8s/base/network.yaml)"
    )


def make_context() -> Context:
    """Create an ingress's ZeroMQ context, with room for a socket to each replica of any fleet.

    ZeroMQ's default is 1,023 sockets.
    """
    context: Context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


def connect_dealer(context: Context, address: ReplicaAddress) -> Socket:
    """Create an ingress's socket to one replica."""
    socket = _make(context, zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
    socket.setsockopt(zmq.SNDHWM, 10_000)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    prove(socket, address.secret, address.public_key)
    socket.connect(address.endpoint)
    return socket


def connect_peer(context: Context, address: KVAddress, max_message_bytes: int) -> Socket:
    """Create a replica's socket to another one, which lends it KV. Raises ZMQError for an invalid address."""
    socket = _make(context, zmq.DEALER)
    try:
        socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        prove(socket, address.secret, address.public_key)
        socket.connect(address.endpoint)
    except BaseException:
        socket.close()
        raise
    return socket


def is_readable(socket: Socket) -> bool:
    """Return whether a message can be received without waiting."""
    return not socket.closed and bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


def descriptor(socket: Socket) -> int:
    """Return the file descriptor to poll; if readable, it need not have a message, see above."""
    return int(socket.getsockopt(zmq.FD))


def _make(context: Context, kind: int) -> Socket:
    socket: Socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    # Heartbeats detect a peer whose machine vanished without closing its connection.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    return socket
