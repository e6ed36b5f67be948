"""What the application still holds when its attackers and its honest clients have gone.

Gauges must be 0 at all of its replicas. Connections to its ports, descriptors, threads and child processes must be
no more than before the siege: of each process no more than the most that one of its kind had in peace, and what is
started once and kept (`ROOM`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from benchmarks.siege_app import MAX_BODY_BYTES, Target, authorization
from benchmarks.siege_watch import processes

PATIENCE_S = 180.0
"""Longest time for the last of it to be given back: an engine keeps what a lost ingress asked for 10 s."""
GAUGES = (
    "raydix_requests_running",
    "raydix_requests_waiting",
    "raydix_waiting_prefill_tokens",
    "raydix_admission_waiting_requests",
    "raydix_admission_waiting_tokens",
    "raydix_open_streams",
    "raydix_router_open_requests",
    "raydix_tenant_generations",
    "raydix_wire_kept_requests",
)


@dataclass(frozen=True, slots=True)
class Size:
    """What the operating system holds for a process."""

    descriptors: int = 0
    threads: int = 0
    children: int = 0


ROOM = {
    # An ingress's threads for large requests, two processes that try grammars, and Ray's own pools and channels to
    # whatever has been replaced: these start when they are first needed.
    "engine": Size(24, 16, 1),
    "ingress": Size(40, 24, 2),
    "hub": Size(24, 16, 0),
    "controller": Size(48, 24, 0),
}


def sizes(target: Target) -> dict[str, Size]:
    """Return the most that any process of a kind has."""
    found: dict[str, Size] = {}
    for kind, size in _sizes(target):
        most = found.get(kind, Size())
        found[kind] = Size(
            max(most.descriptors, size.descriptors),
            max(most.threads, size.threads),
            max(most.children, size.children),
        )
    return found


async def leaked(target: Target, in_peace: dict[str, Size]) -> list[str]:
    """Wait until nothing is held; return what still is after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while held := await _held(target, in_peace):
        if time.monotonic() > deadline:
            return held
        await asyncio.sleep(1.0)
    return [fault for fault in [await _refused(target)] if fault]


async def _held(target: Target, in_peace: dict[str, Size]) -> list[str]:
    if not await target.app.is_whole() or not await target.app.samples("raydix_engine_up"):
        return ["the application is not whole"]
    held = [
        f"{name} of {labels.get('replica')} is {value:g}"
        for name in GAUGES
        for labels, value in await target.app.samples(name)
        if value
    ]
    pages = await target.app.samples("raydix_kv_pages", state="active")
    held += [f"{value:g} KV pages of {labels['replica']} are in use" for labels, value in pages if value]
    return held + await asyncio.to_thread(lambda: [*_connections(target), *_grown(target, in_peace)])


def _connections(target: Target) -> Iterator[str]:
    """Yield connections to the application's ports whose other end is neither its own nor this program's."""
    ours = set()
    with contextlib.suppress(psutil.Error):
        ours = {c.laddr.port for c in psutil.Process(os.getpid()).net_connections("tcp") if c.laddr}
    everything = processes(target)
    peers = {c.laddr.port for pids in everything.values() for pid in pids for c in _tcp(pid)}
    ports = {target.port, target.metrics_port, *target.wire_ports}
    for kind, pids in everything.items():
        strange = Counter(
            c.laddr.port
            for pid in pids
            for c in _tcp(pid)
            if c.raddr and c.laddr.port in ports and c.raddr.port not in ours | peers
        )
        for port, count in strange.items():
            yield f"{count} connections to port {port} of an {kind} are open, and nobody has the other end"


def _grown(target: Target, in_peace: dict[str, Size]) -> Iterator[str]:
    for kind, size in _sizes(target):
        before, room = in_peace[kind], ROOM[kind]
        for what in ("descriptors", "threads", "children"):
            has, most = getattr(size, what), getattr(before, what) + getattr(room, what)
            if has > most:
                yield f"an {kind} has {has} {what}, {getattr(before, what)} in peace"


async def _refused(target: Target) -> str | None:
    """Send a body as large as is allowed: its room is refused where that of earlier ones was not given back."""
    async with httpx.AsyncClient(base_url=target.app.url, timeout=120) as client:
        body = b'{"model": "demo", "prompt": "' + b"a " * (MAX_BODY_BYTES // 2 - 100) + b'"}'
        for _ in range(2 * target.app.size.ingresses):
            headers = {"content-type": "application/json", "connection": "close", **authorization("hostile")}
            answer = await client.post("/v1/completions", content=body, headers=headers)
            if answer.status_code != 400:
                return f"a body of {len(body)} bytes is answered with {answer.status_code}: {answer.text[:200]}"
    return None


def _sizes(target: Target) -> Iterator[tuple[str, Size]]:
    for kind, pids in processes(target).items():
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                yield kind, Size(process.num_fds(), process.num_threads(), len(process.children()))


def _tcp(pid: int) -> list[Any]:
    with contextlib.suppress(psutil.Error):
        return list(psutil.Process(pid).net_connections("tcp"))
    return []
