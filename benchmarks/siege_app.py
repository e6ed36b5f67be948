"""The application under siege: two tenants, an admin, and limits short enough to be met again and again."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.chaos_app import App, Size, started
from benchmarks.private_ray import HOST, free_port
from benchmarks.wall_clock import WallClocks
from deployments.config.tenants import hash_key

KEYS = {"honest": "rdx-honest-tenant", "hostile": "rdx-hostile-tenant", "admin": "rdx-admin"}
BODY_TIMEOUT_S, HEADER_TIMEOUT_S, HANDSHAKE_S, SLOW_READER_S = 6.0, 4.0, 4.0, 6.0
KEEP_S = 10.0
"""Seconds for which an engine keeps a stream that has ended; what is then held is a leak."""
MAX_BODY_BYTES, MAX_TOTAL_BODY_BYTES = 2**23, 2**25
_WIRE_PORTS = 64
"""Ports for engines: of each that is replaced, the old one may still be there."""


def authorization(who: str) -> dict[str, str]:
    """Return the header with a tenant's or the admin's key."""
    return {"authorization": f"Bearer {KEYS[who]}"}


@dataclass(frozen=True, slots=True)
class Outage:
    """A process that was killed or stopped on purpose. Times are `time.monotonic()`."""

    kind: str
    """What it was: "engine", "ingress", "hub", "controller" or "worker"."""
    how: str
    """"killed" or "stopped"."""
    began: float
    ended: float
    """When the application was whole again, or the process went on."""


@dataclass(slots=True)
class Target:
    """What attackers know of the application, and what they have done to its processes."""

    app: App
    metrics_port: int
    wire_ports: range
    num_flood: int = 100
    """Connections of each flood."""
    clocks: WallClocks | None = None
    """The wall clocks of its processes; None where they cannot be moved."""
    outages: list[Outage] = field(default_factory=list)

    @property
    def port(self) -> int:
        """The ingresses' port."""
        return urlsplit(self.app.url).port or 0

    def wire_addresses(self) -> list[tuple[str, int]]:
        """Return where the engines' wires listen, as a port scan would find them."""
        found = set()
        for pid in self.app.engines():
            with contextlib.suppress(psutil.Error):
                for connection in psutil.Process(pid).net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port in self.wire_ports:
                        found.add((connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port))
        return sorted(found)


@contextlib.contextmanager
def besieged(size: Size, num_flood: int) -> Iterator[Target]:
    """Start the application, for floods of so many connections; nothing is left of it at the end."""
    metrics_port, wire_ports = free_port(), _free_range(_WIRE_PORTS)
    with contextlib.ExitStack() as stack:
        clocks = _clocks(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        with contextlib.nullcontext() if clocks is None else clocks.preloaded():
            app = stack.enter_context(started(size, _changes(metrics_port, wire_ports), authorization("admin")))
        stack.callback(app.close)
        yield Target(app, metrics_port, wire_ports, num_flood, clocks)


def _clocks(directory: Path) -> WallClocks | None:
    try:
        return WallClocks(directory)
    except RuntimeError as error:
        print(f"Wall clocks will not be moved: {error}", file=sys.stderr)
        return None


def _changes(metrics_port: int, wire_ports: range) -> dict[str, Any]:
    return {
        "tenants": [{"name": name, "key_hashes": [hash_key(KEYS[name])]} for name in ("honest", "hostile")],
        "admin_key_hash": hash_key(KEYS["admin"]),
        "metrics": {"port": metrics_port},
        "wire": {"ports": [wire_ports[0], wire_ports[-1]], "handshake_s": HANDSHAKE_S},
        "ingresses": {"header_timeout_s": HEADER_TIMEOUT_S},
        "streams": {"keep_s": KEEP_S},
        "limits": {
            "body_timeout_s": BODY_TIMEOUT_S,
            "slow_reader_timeout_s": SLOW_READER_S,
            "max_body_bytes": MAX_BODY_BYTES,
            "max_total_body_bytes": MAX_TOTAL_BODY_BYTES,
        },
        # A slow machine is no failure.
        "health": {"check_period_s": 1.0, "check_timeout_s": 20.0, "migration_wait_s": 120.0},
    }


def _free_range(count: int) -> range:
    """Return ports in a row on which nobody listens, below those that the kernel gives to connections."""
    for first in range(20_000, 32_000, count):
        if all(_is_free(port) for port in range(first, first + count)):
            return range(first, first + count)
    raise RuntimeError(f"there are no {count} free ports in a row from 20000 to 32000 for the engines' wires")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
