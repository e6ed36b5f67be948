"""HAProxy before the ingresses, as a Kubernetes Service is: it forwards TCP to those that say they are ready."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Sequence

from tests.cluster.support.host import Host
from tests.support.unpacked_program import libraries_of

PORT = 80
_CONFIG = """
defaults
    mode tcp
    timeout connect 2s
    timeout client 1h
    timeout server 1h
    timeout check 60s
    option redispatch
listen ingresses
    bind {address}:{port}
    balance roundrobin
    option httpchk GET /ready
    default-server check inter 200ms fall 1 rise 1
{servers}
"""


def program() -> str | None:
    """Return the path of HAProxy; None where it is not installed."""
    return shutil.which("haproxy")


def start_balancer(host: Host, ingresses: Sequence[Host], port: int) -> str:
    """Start a balancer on `host` for the ingresses that listen on a port of other hosts, and return its URL."""
    haproxy = program()
    assert haproxy is not None
    servers = "\n".join(f"    server {each.name} {each.address}:{port}" for each in ingresses)
    config = host.directory / "haproxy.cfg"
    text = _CONFIG.format(address=host.address, port=PORT, servers=servers)
    host.run("sh", "-c", f"cat > {config} <<'END'\n{text}\nEND")
    host.start(haproxy, "-db", "-f", str(config), env=libraries_of(haproxy), stdout=subprocess.DEVNULL)
    wait_for_port(host.address, PORT)
    return f"http://{host.address}:{PORT}"


def wait_for_port(address: str, port: int, timeout_s: float = 180) -> None:
    """Return when a process listens on a port."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"no process listens on {address}:{port} after {timeout_s:g} s"
            time.sleep(0.1)
