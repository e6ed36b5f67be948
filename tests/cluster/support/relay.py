"""Delays what a test host sends and receives: the kernel's own emulation, tc netem, is missing from many kernels.

    host: eth0 ─┐                        ┌─ port of the switch
                tap ─ this process, which holds each frame for a while ─ tap

A tap has no offloads, so the kernel cuts and checks each frame before this process reads it.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_SET_INTERFACE, _TAP, _NO_PACKET_INFO = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES = 2**16


def open_tap(name: str) -> int:
    """Create an interface in this network namespace; frames are read from and written to the file descriptor."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _SET_INTERFACE, struct.pack("16sH", name.encode(), _TAP | _NO_PACKET_INFO))
    return tap


def main(host_side: str, switch_side: str, delay: str) -> None:
    """Relay frames between two new interfaces until standard input ends, each frame `delay` seconds late."""
    delay_s = float(delay)
    taps = open_tap(host_side), open_tap(switch_side)
    held: deque[tuple[float, int, bytes]] = deque()  # when to send, to which tap, what
    selector = selectors.DefaultSelector()
    for tap, other in (taps, taps[::-1]):
        selector.register(tap, selectors.EVENT_READ, other)
    selector.register(sys.stdin, selectors.EVENT_READ, None)
    print("up", flush=True)
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        for key, _ in selector.select(wait_s):
            if key.data is None:
                return
            held.append((time.monotonic() + delay_s, key.data, os.read(key.fd, _FRAME_BYTES)))
        while held and held[0][0] <= time.monotonic():
            _, tap, frame = held.popleft()
            with suppress(OSError):  # An interface that is not up yet loses frames, as a cable does.
                os.write(tap, frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
