"""The faults that chaos.py injects into a running application, which can recover from each by itself."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import random
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import psutil

from benchmarks.chaos_app import App

Fault = Callable[[App, random.Random], Awaitable[str]]
"""Injects the fault and describes it. Returns when the damage is done, not when it is repaired."""

_PIDFD_GETFD = 438
"""System call number, the same on all architectures (Linux 5.6)."""
_CUT_S = 0.02
"""Seconds between two searches for connections that were reopened during a cut."""


class NotPossible(RuntimeError):
    """This machine, or this application, does not allow the fault."""


async def kill_engine(app: App, draw: random.Random) -> str:
    """Kill an engine, as the kernel does when memory runs out."""
    pid = _pick(app.engines(), draw)
    app.send(pid, signal.SIGKILL)
    return f"engine {pid} killed"


async def kill_two_engines(app: App, draw: random.Random) -> str:
    """Kill two engines, the second while the streams of the first migrate."""
    if len(app.engines()) < 3:
        return await kill_engine(app, draw)
    first, second = draw.sample(app.engines(), 2)
    app.send(first, signal.SIGKILL)
    await asyncio.sleep(draw.uniform(0, 0.5))
    app.send(second, signal.SIGKILL)
    return f"engines {first} and {second} killed"


async def pause_engine(app: App, draw: random.Random) -> str:
    """Stop an engine for a while and let it continue; its streams may have migrated by then."""
    pid, seconds = _pick(app.engines(), draw), draw.uniform(1, 5)
    app.send(pid, signal.SIGSTOP)
    await asyncio.sleep(seconds)
    app.send(pid, signal.SIGCONT)
    return f"engine {pid} stopped for {seconds:.1f} s"


async def wedge_engine(app: App, draw: random.Random) -> str:
    """Stop an engine for good; it is killed at the end if Serve has not done so."""
    pid = _pick(app.engines(), draw)
    app.send(pid, signal.SIGSTOP)
    await app.until(lambda: pid not in app.engines(), timeout=12)
    app.send(pid, signal.SIGKILL)
    return f"engine {pid} stopped for good"


async def kill_ingress(app: App, draw: random.Random) -> str:
    """Kill an ingress: its clients' streams break off, and other ingresses take their next requests."""
    if len(app.ingresses()) < 2:
        raise NotPossible("killing an ingress requires at least two")
    pid = _pick(app.ingresses(), draw)
    app.send(pid, signal.SIGKILL)
    return f"ingress {pid} killed"


async def cut_wire(app: App, draw: random.Random) -> str:
    """Close every connection between one ingress and one engine, again and again for a while."""
    ingress, engine = _pick(app.ingresses(), draw), _pick(app.engines(), draw)
    seconds = draw.choice([0.0, 0.5, 5.0])
    num_cut = await cut_between(ingress, engine, seconds)
    return f"{num_cut} connections between ingress {ingress} and engine {engine} cut in {seconds:g} s"


async def cut_between(ingress: int, engine: int, seconds: float) -> int:
    """Close every connection between two processes, again and again for a while. Returns how many it were.

    Raises NotPossible where the kernel does not allow it.
    """
    end, num_cut = asyncio.get_running_loop().time() + seconds, 0
    while True:
        num_cut += _shut_connections(ingress, engine)
        if asyncio.get_running_loop().time() >= end:
            return num_cut
        await asyncio.sleep(_CUT_S)


async def remove_node(app: App, draw: random.Random) -> str:
    """Remove a Ray node with its engines, while other nodes have room for them."""
    nodes = [] if app.cluster is None else [node for node in app.cluster.list_all_nodes() if not node.head]
    if len(nodes) < max(2, app.size.nodes):
        raise NotPossible("the remaining nodes are all needed")
    node = draw.choice([node for node in nodes if _engines_on(node, app)])
    await asyncio.to_thread(app.cluster.remove_node, node, allow_graceful=False)
    return f"node {node.node_id[:8]} removed"


REPLACES_ENGINES = ("kill", "kill2", "wedge", "node")
"""Faults that replace engine replicas."""
FAULTS: Mapping[str, Fault] = {
    "kill": kill_engine,
    "kill2": kill_two_engines,
    "pause": pause_engine,
    "wedge": wedge_engine,
    "ingress": kill_ingress,
    "cut": cut_wire,
    "node": remove_node,
}


def _pick(pids: list[int], draw: random.Random) -> int:
    if not pids:
        raise NotPossible("there is no such process at the moment")
    return draw.choice(pids)


def _engines_on(node: Any, app: App) -> list[int]:
    """Return the engine processes of a `ray.cluster_utils.Cluster`'s node: descendants of its raylet."""
    (raylet,) = node.all_processes["raylet"]
    workers = {worker.pid for worker in psutil.Process(raylet.process.pid).children(recursive=True)}
    return sorted(workers & set(app.engines()))


def _shut_connections(ingress: int, engine: int) -> int:
    """Shut all connections from one process to ports that the other listens on; returns their number."""
    try:
        listening = {
            c.laddr.port for c in psutil.Process(engine).net_connections("tcp") if c.status == psutil.CONN_LISTEN
        }
        found = [
            c.fd
            for c in psutil.Process(ingress).net_connections("tcp")
            if c.raddr and c.raddr.port in listening and c.status == psutil.CONN_ESTABLISHED
        ]
    except psutil.NoSuchProcess:
        return 0
    return sum(_shut(ingress, descriptor) for descriptor in found)


def _shut(pid: int, descriptor: int) -> bool:
    """Shut down another process's socket."""
    connection = foreign_socket(pid, descriptor)
    if connection is None:
        return False
    with connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # closed meanwhile
    return True


def foreign_socket(pid: int, descriptor: int) -> socket.socket | None:
    """Return another process's socket, through a descriptor of our own (pidfd_getfd(2)); None if it is gone.

    Raises NotPossible where the kernel does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    own = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
    error = ctypes.get_errno()
    os.close(process)
    if own < 0 and error in (errno.EPERM, errno.ENOSYS):
        raise NotPossible(f"the kernel does not let one process use another's connection: {os.strerror(error)}")
    return None if own < 0 else socket.socket(fileno=own)
