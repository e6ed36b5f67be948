"""Stops listening, after accepting every connection that the kernel has taken for this ingress.

    client    SYN ─▶ handshake ─▶ queue of the listener ─▶ accept

Closing a listener resets its queue, although other ingresses listen on the same port. So it first drops new
handshakes: a client with a dropped SYN sends it again, to a remaining listener. Then the pending handshakes
complete, the queue is emptied, and the listener closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import select
import socket
import struct

from deployments.wire.deadlines.deadline import awake_now

HANDSHAKE_S = 0.05
"""Seconds for handshakes that have begun. A client whose SYN comes meanwhile sends it again after a second."""
ACCEPT_S = 5.0
"""Most seconds for the queue: where no descriptor is free, it is never empty."""
_SO_ATTACH_FILTER = 26
_FLAGS, _SYN = 13, 0x02
"""Place of a TCP header's flags, and the flag of a connection's first packet."""
_DROP_SYN = (
    (0x30, 0, 0, _FLAGS),  # load the byte
    (0x45, 0, 1, _SYN),  # if SYN is set, continue, else skip one
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # keep all of it
)
"""A classic BPF program: code, steps to jump if true, steps if false, operand."""


async def take_queued(listener: socket.socket) -> None:
    """Return when the event loop, which accepts on `listener`, has accepted all; then close the listener
    immediately.

    Where the kernel has no such filter, a connection may come between the two.
    """
    with contextlib.suppress(OSError):
        _drop_first_packets(listener)
    deadline = awake_now() + ACCEPT_S
    await asyncio.sleep(HANDSHAKE_S)
    while _has_queued(listener) and awake_now() < deadline:
        await asyncio.sleep(0)


def _drop_first_packets(listener: socket.socket) -> None:
    code = b"".join(struct.pack("HBBI", *step) for step in _DROP_SYN)
    program = ctypes.create_string_buffer(code)  # The buffer must live until the call returns.
    listener.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(_DROP_SYN), ctypes.addressof(program))
    )


def _has_queued(listener: socket.socket) -> bool:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))
