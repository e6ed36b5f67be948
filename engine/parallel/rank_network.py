"""The network between the ranks of a model: their addresses, and connections that end when a host is lost.

Ranks on one machine use its loopback address. On several hosts, rank 0 listens at an address of its own host, and
another rank uses the address from which its host reaches rank 0. A named network interface decides both.

A host that vanishes closes no connection. The kernels ask each other about silent connections, and end those whose
other host does not answer, so transfers that wait for it fail. A kernel also answers for a process that computes
or is suspended: such a process only delays the others, unless it stops reading in the middle of a transfer.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address

LOOPBACK = "127.0.0.1"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_ASK_EVERY_S = 1


@dataclass(frozen=True, slots=True)
class RankNetwork:
    """How the ranks of one model reach each other."""

    host: str = LOOPBACK
    """Rank 0's address: a loopback address if all ranks are on one machine."""
    lost_after_s: float | None = None
    """Seconds without an answer after which a host is lost, and one more if nothing is sent; None: never."""
    interface: str | None = None
    """The network interface that each rank uses; None: the one that reaches rank 0."""

    @property
    def is_one_machine(self) -> bool:
        """Whether all ranks are on one machine."""
        return ip_address(self.host).is_loopback

    def own_address(self) -> str:
        """Return the address at which this process's rank listens. Raises ValueError."""
        if self.is_one_machine:
            return self.host
        if self.interface is not None:
            return address_of(self.interface)
        with socket.socket(_family(self.host), socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, 9))  # sends nothing, only asks the kernel for its route
            address: str = probe.getsockname()[0]
            return address

    def listen(self) -> socket.socket:
        """Listen on a free port of rank 0's address."""
        server = socket.create_server((self.host, 0), family=_family(self.host))
        self.end_when_lost(server)  # and the connections that it accepts
        return server

    def connect(self, port: int, timeout: float) -> socket.socket:
        """Connect to a port of rank 0's address. Raises OSError."""
        peer = socket.create_connection((self.host, port), timeout)
        peer.settimeout(None)
        self.end_when_lost(peer)
        return peer

    @contextmanager
    def ending_when_lost(self) -> Iterator[None]:
        """Watch the connections that are made meanwhile, for which torch has no setting (Linux)."""
        if self.is_one_machine:
            yield
            return
        before = _sockets()
        yield
        for file, _ in _sockets().items() - before.items():
            with suppress(OSError), socket.socket(fileno=os.dup(file)) as peer:
                if peer.type == socket.SOCK_STREAM and peer.getsockname()[0] == self.own_address():
                    self.end_when_lost(peer)

    def end_when_lost(self, peer: socket.socket) -> None:
        """Let the kernel end a connection when the other host is lost."""
        if self.lost_after_s is None or self.is_one_machine or sys.platform != "linux":
            return
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_EVERY_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_EVERY_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self.lost_after_s))


ONE_MACHINE = RankNetwork()


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface of this host (Linux). Raises ValueError."""
    found = _addresses()
    if interface not in found:
        there = ", ".join(f"{name} ({address})" for name, address in found.items())
        raise ValueError(
            f"rank_interface is {interface!r}, but {socket.gethostname()} has no such network interface with an "
            f"IPv4 address; there are {there or 'none'}"
        )
    return found[interface]


def let_nccl_use(address: str) -> None:
    """Let NCCL reach other hosts through the interface with this address, unless the environment names one."""
    names = [name for name, each in _addresses().items() if each == address]
    if names:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={names[0]}")


def _addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one, by the interface's name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # It has none.
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _sockets() -> dict[int, str]:
    """Return the names of this process's sockets by their file descriptors (Linux)."""
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # It was closed meanwhile.
                link = os.readlink(f"/proc/self/fd/{name}")
                if link.startswith("socket:"):
                    found[int(name)] = link
    return found
