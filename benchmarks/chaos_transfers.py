"""The faults that chaos.py aims at KV on its way: at a transfer between two replicas, and at the tier in files.

The kernel tells which transfer is under way: engines connect to each other for KV alone, so when more bytes than
messages have comes through such a connection, it is the first page of a transfer of many.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos_app import App
from benchmarks.chaos_faults import Fault, NotPossible, foreign_socket

LEAST_BYTES = 16_384
"""Bytes through a connection that must be of a page: messages without one are smaller."""
FIND_S = 60.0
"""Longest wait for a transfer, or for the tier to be in use."""
_LOOK_S = 0.0005
_MEET_S = 0.5
"""Seconds after which new connections are looked for."""
_RECEIVED = slice(128, 136)
"""Where `tcpi_bytes_received` is in Linux's `struct tcp_info`."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pages on their way between two engine processes."""

    source: int
    receiver: int
    num_bytes: int
    """Bytes of them that had come."""

    def __str__(self) -> str:
        return f"{self.num_bytes // 1024} KiB had come from engine {self.source} to {self.receiver}"


async def kill_source(app: App, draw: random.Random) -> str:
    """Kill an engine while it sends pages."""
    found = await _strike(app, lambda transfer: app.send(transfer.source, signal.SIGKILL))
    return f"source killed, {found}"


async def kill_receiver(app: App, draw: random.Random) -> str:
    """Kill an engine while it receives pages."""
    found = await _strike(app, lambda transfer: app.send(transfer.receiver, signal.SIGKILL))
    return f"receiver killed, {found}"


async def stall_source(app: App, draw: random.Random) -> str:
    """Stop an engine while it sends pages, for a shorter or a longer time than its receivers wait."""
    seconds = draw.choice([0.5, 4.0])
    found = await _strike(app, lambda transfer: app.send(transfer.source, signal.SIGSTOP))
    await asyncio.sleep(seconds)
    app.send(found.source, signal.SIGCONT)
    return f"source stopped for {seconds:g} s, {found}"


async def break_tier(app: App, draw: random.Random) -> str:
    """Break the directory of the KV tier while pages go there and come from there, and repair it after a while."""
    if app.tier is None:
        raise NotPossible("the application keeps no KV in files")
    moved = await _tier_pages(app)
    if not await app.until(lambda: _has_more(app, moved), FIND_S):
        raise NotPossible(f"no page went to the KV tier or came from there within {FIND_S:g} s")
    what = draw.choice(["removed", "replaced by a file", "filled with garbage"])
    manifests = {path: path.read_bytes() for path in app.tier.glob("*.json")}
    if what == "filled with garbage":
        return f"{_spoil(app.tier, draw)} files of the KV tier {what}"
    await asyncio.to_thread(shutil.rmtree, app.tier, ignore_errors=True)
    if what == "replaced by a file":
        await asyncio.to_thread(_replace, app.tier)
    await asyncio.sleep(draw.uniform(2.0, 5.0))
    if app.tier.is_file():
        app.tier.unlink()
    app.tier.mkdir(exist_ok=True)
    for path, manifest in manifests.items():
        path.write_bytes(manifest)
    return f"the KV tier's directory {what}"


TRANSFER_FAULTS: Mapping[str, Fault] = {
    "source": kill_source,
    "receiver": kill_receiver,
    "stall": stall_source,
    "tier": break_tier,
}


# --- transfers ----------------------------------------------------------------------------------------------


async def _strike(app: App, strike: Callable[[Transfer], None]) -> Transfer:
    """Strike at the next transfer as soon as it is seen. Raises NotPossible when there is none."""
    return await asyncio.to_thread(_find_and_strike, app, strike)


def _find_and_strike(app: App, strike: Callable[[Transfer], None]) -> Transfer:
    deadline = time.monotonic() + FIND_S
    while time.monotonic() < deadline:
        with TransferWatch(app.engines()) as watch:
            found = watch.wait(_MEET_S)
        if found is not None:  # our descriptors are closed: a killed process's connections end
            strike(found)
            return found
    raise NotPossible(f"no engine has fetched KV from another within {FIND_S:g} s")


class TransferWatch:
    """Counts what comes through the connections that engine processes have to each other when it is made."""

    def __init__(self, engines: Sequence[int]) -> None:
        self._sockets = ExitStack()
        self._counted: list[tuple[int, int, socket.socket, int]] = []  # source, receiver, its end, bytes so far
        ends = {(one.laddr, one.raddr): (pid, one.fd) for pid in engines for one in _connections_of(pid)}
        for (here, there), (pid, descriptor) in ends.items():
            other, _ = ends.get((there, here), (pid, 0))
            if other != pid and (own := foreign_socket(pid, descriptor)) is not None:
                self._sockets.enter_context(own)
                self._counted.append((other, pid, own, _bytes_received(own)))

    def __enter__(self) -> TransferWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._sockets.close()

    def wait(self, timeout_s: float) -> Transfer | None:
        """Return the first transfer of which pages come; None after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for source, receiver, own, before in self._counted:
                if (num_bytes := _bytes_received(own) - before) >= LEAST_BYTES:
                    return Transfer(source, receiver, num_bytes)
            time.sleep(_LOOK_S)
        return None


def _connections_of(pid: int) -> list[Any]:
    """Return a process's connections; none of a process that is gone."""
    with contextlib.suppress(psutil.Error):
        return [one for one in psutil.Process(pid).net_connections("tcp") if one.raddr]
    return []


def _bytes_received(connection: socket.socket) -> int:
    """Return how many bytes have come through a connection, as tcp(7) counts them."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.stop)
    return int.from_bytes(info[_RECEIVED], sys.byteorder)


# --- the tier -----------------------------------------------------------------------------------------------


async def _tier_pages(app: App) -> float:
    return await app.metric("raydix_kv_transfer_pages_total", tier="file")


async def _has_more(app: App, moved: float) -> bool:
    return await _tier_pages(app) > moved


def _spoil(directory: Path, draw: random.Random) -> int:
    """Write garbage into pages, or cut them off, each in its place; return how many."""
    num_spoilt = 0
    for path in directory.glob("*/*.kv"):
        try:
            with path.open("r+b") as page:
                if draw.random() < 0.5:
                    page.truncate(draw.randrange(path.stat().st_size))
                else:
                    page.seek(draw.randrange(64))
                    page.write(draw.randbytes(1024))
        except (OSError, ValueError):
            continue  # an engine has deleted it meanwhile
        num_spoilt += 1
    return num_spoilt


def _replace(directory: Path) -> None:
    """Put a file in a directory's place, which an engine may be making again at the moment."""
    for _ in range(100):
        shutil.rmtree(directory, ignore_errors=True)
        try:
            directory.touch(exist_ok=False)
        except FileExistsError:
            continue
        return
