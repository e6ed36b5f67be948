"""A network of test hosts that a test can cut: a switch in a namespace of its own, and a port for each host.

this process ─ port ┐
host 1 ─ port ──────┤ switch
host 2 ─ port ──────┘
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cluster.support.host import Host, in_network_of

_PREFIX = 24
_RELAY = Path(__file__).with_name("relay.py")
_NO_HOST = "02:00:00:00:00:01"
"""A link-layer address that no host has: what is sent there is lost, and no sender hears of it."""


class NetworkUnavailable(Exception):
    """This machine cannot have test hosts; the text says why."""


class Network:
    """Hosts in one subnet, which this process can reach too. Use it as a context."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        number = os.getpid() % 2**14
        self._subnet = f"10.{64 + number // 256}.{number % 256}"
        self._port = f"rdx{number}"
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        """Raises `NetworkUnavailable`."""
        if os.geteuid() != 0:
            raise NetworkUnavailable("test hosts are network namespaces, which only root may create")
        with ExitStack() as ends:
            self.directory = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="rdx")))
            try:
                self._switch = ends.enter_context(_Switch())
                self._connect(os.getpid(), self._port, 254)
            except OSError as error:
                raise NetworkUnavailable(f"test hosts need network namespaces: {error}") from error
            ends.callback(in_network_of, os.getpid(), ("ip", "link", "del", self._port))
            ends.callback(self._kill_hosts)
            self._ends = ends.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.close()

    @property
    def address(self) -> str:
        """This process's address in the network."""
        return f"{self._subnet}.254"

    def host(self, name: str, disk_bytes: int = 2**30, delay_s: float | None = None) -> Host:
        """Add a host. With `delay_s`, each frame that it sends or receives arrives so much later."""
        number = len(self.hosts) + 1
        host = Host(name, f"{self._subnet}.{number}", self.directory, disk_bytes)
        self.hosts.append(host)
        if delay_s is None:
            self._connect(host.pid, "eth0", number)
        else:
            self._connect_slowly(host.pid, "eth0", number, delay_s)
        return host

    def cut(self, host: Host) -> None:
        """Pull the plug of a host: nothing that it sends arrives, nor what is sent to it."""
        self._switch.run("ip", "link", "set", self._switch_port(host), "down")

    def heal(self, host: Host) -> None:
        """Undo `cut`."""
        self._switch.run("ip", "link", "set", self._switch_port(host), "up")

    def cut_between(self, one: Host, other: Host) -> None:
        """Lose all that two hosts send each other. Each still reaches all others."""
        for sender, receiver in ((one, other), (other, one)):
            neighbour = ("ip", "neigh", "replace", receiver.address, "lladdr", _NO_HOST)
            in_network_of(sender.pid, (*neighbour, "nud", "permanent", "dev", "eth0"))

    def heal_between(self, one: Host, other: Host) -> None:
        """Undo `cut_between`."""
        for sender, receiver in ((one, other), (other, one)):
            in_network_of(sender.pid, ("ip", "neigh", "del", receiver.address, "dev", "eth0"))

    def throttle(self, host: Host, bits_per_s: int | None) -> None:
        """Limit what reaches a host; None: as fast as this machine can."""
        qdisc = ("dev", self._switch_port(host), "root")
        if bits_per_s is None:
            self._switch.run("tc", "qdisc", "del", *qdisc)
            return
        burst = max(bits_per_s // 80, 2**16)  # of 100 ms, in bytes; a segment has up to 64 KiB
        limits = ("rate", f"{bits_per_s}bit", "burst", str(burst), "latency", "400ms")
        self._switch.run("tc", "qdisc", "replace", *qdisc, "tbf", *limits)

    def _kill_hosts(self) -> None:
        for host in self.hosts:
            host.kill()

    def _switch_port(self, host: Host) -> str:
        return f"port{host.address.rsplit('.', 1)[1]}"

    def _connect(self, pid: int, interface: str, number: int) -> None:
        """Lay a cable from a process's network to the switch, and give its end an address."""
        port = f"port{number}"
        peer = ("peer", "name", interface, "netns", str(pid))
        self._switch.run("ip", "link", "add", port, "type", "veth", *peer)
        self._plug_in(pid, interface, number)

    def _connect_slowly(self, pid: int, interface: str, number: int, delay_s: float) -> None:
        """Lay a cable that delays frames: two taps, and a process in the switch's network between them."""
        far = f"far{number}"
        relay = self._switch.start(sys.executable, str(_RELAY), far, f"port{number}", str(delay_s))
        self._ends.callback(relay.communicate)
        assert relay.stdout is not None
        if relay.stdout.readline() != "up\n":
            raise NetworkUnavailable("test hosts with a delay need /dev/net/tun")
        self._switch.run("ip", "link", "set", far, "name", interface, "netns", str(pid))
        self._plug_in(pid, interface, number)

    def _plug_in(self, pid: int, interface: str, number: int) -> None:
        """Connect a cable's one end to the switch, and give the other one an address."""
        self._switch.run("ip", "link", "set", f"port{number}", "master", "switch", "up")
        address = f"{self._subnet}.{number}/{_PREFIX}"
        in_network_of(pid, ("ip", "address", "add", address, "dev", interface))
        in_network_of(pid, ("ip", "link", "set", interface, "up"))


class _Switch:
    """The network namespace that has the bridge. It lives as long as its process."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo up; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        if self._process.stdout.readline() != "up\n":
            raise OSError(self._process.stderr.read().strip())
        self.run("ip", "link", "add", "switch", "type", "bridge")
        self.run("ip", "link", "set", "switch", "up")
        return self

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command in the namespace, with pipes to its standard input and output."""
        entered = ("nsenter", f"--target={self._process.pid}", "--net", "--", *command)
        return subprocess.Popen(entered, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, *command: str) -> None:
        """Run a command in the namespace. Raises OSError."""
        in_network_of(self._process.pid, command)

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
