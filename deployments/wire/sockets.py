"""The wire's ZeroMQ sockets: their options, and what of them is easily got wrong.

A socket's file descriptor signals edges, not levels: after any send, and after each wake-up, `is_readable` has to
be asked until it says no, or messages lie there unnoticed.
"""

from __future__ import annotations

import uuid

import zmq

from deployments.wire.messages import MAX_MESSAGE_BYTES

MAX_HELLO_BYTES = 4 * 2**20
"""Largest message an ingress may send: a hello that names all its streams."""

_POLLIN = int(zmq.POLLIN)  # as the enum it costs more than the question itself
_EVENTS = int(zmq.EVENTS)

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


def bind_router(context: Context, host: str, ports: tuple[int, int] | None = None) -> tuple[Socket, str]:
    """A replica's socket on a free port of `host`, and its endpoint.

    `ports` are the lowest and the highest that may be taken; None takes any. Raises OSError when none is free.
    """
    socket = _make(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so when a peer is gone or its pipe is full
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_HELLO_BYTES)
    address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    port = socket.bind_to_random_port(address) if ports is None else _bind_to_first(socket, address, *ports)
    return socket, f"{address}:{port}"


def _bind_to_first(socket: Socket, address: str, low: int, high: int) -> int:
    for port in range(low, high + 1):
        try:
            socket.bind(f"{address}:{port}")
            return port
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
    socket.close()
    raise OSError(
        f"no port from {low} to {high} is free on {address}: each engine replica of a node takes one; "
        "widen wire.ports, and what lets it through (k8s/base/network.yaml)"
    )


def connect_dealer(context: Context, endpoint: str) -> Socket:
    """An ingress's socket to one replica."""
    socket = _make(context, zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
    socket.setsockopt(zmq.SNDHWM, 10_000)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.connect(endpoint)
    return socket


def is_readable(socket: Socket) -> bool:
    """Whether a message can be received without waiting."""
    return not socket.closed and bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


def descriptor(socket: Socket) -> int:
    """What to poll; readable does not mean that there is a message, see above."""
    return int(socket.getsockopt(zmq.FD))


def _make(context: Context, kind: int) -> Socket:
    socket: Socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    # A peer whose machine vanished without closing its connection is noticed by these.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    return socket
