"""Deadlines do not count the time in which the process stood still, and look once more for what arrived."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from benchmarks.private_ray import free_port
from deployments.wire.deadlines.deadline import BETWEEN_S, Deadline
from deployments.wire.deadlines.time_limit import timeout
from engine.base.awake_clock import STILL_S
from tests.deployments.support.served_api import run_on
from tests.deployments.support.virtual_time import run

LIMIT_S = 2.0
PAUSE_S = 2 * LIMIT_S


def test_a_deadline_fires_when_it_is_due_and_once() -> None:
    async def scenario() -> None:
        loop, fired = asyncio.get_running_loop(), list[float]()
        deadlines = [Deadline(loop) for _ in range(4)]
        for deadline, seconds in zip(deadlines, (3.0, 1.0, 2.0, 60.0), strict=True):
            deadline.set(seconds, lambda: fired.append(loop.time()))
        deadlines[0].cancel()
        deadlines[2].set(5.0, lambda: fired.append(loop.time()))
        deadlines[3].set(0.5, lambda: fired.append(loop.time()))
        await asyncio.sleep(100)
        assert fired == pytest.approx([0.5, 1.0, 5.0], abs=2 * BETWEEN_S)

    run(scenario())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_messages_that_arrived_while_the_loop_was_blocked_are_read_before_a_deadline_fires(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Also when all of the time is over, and the loop calls its timers before it reads."""

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        for blocked_s in (2 * STILL_S, STILL_S / 2):
            waiting = asyncio.create_task(within(blocked_s / 2, reader.readexactly(5)))
            await asyncio.sleep(0)
            theirs.sendall(b"hello")
            time.sleep(blocked_s)
            assert await waiting == b"hello"
        writer.close()
        theirs.close()

    run_on(loop, scenario())


async def within(seconds: float, work: Coroutine[Any, Any, bytes]) -> bytes:
    with timeout(seconds):
        return await work


SERVER = """
import asyncio, sys, uvloop
from deployments.api.http.body import read_json
from deployments.api.http.body_memory import BodyMemory
from deployments.config.limits import Limits
from deployments.config.settings import IngressSettings
from deployments.ingress.http_server import HttpServer
from starlette.requests import Request

limits = Limits(body_timeout_s={limit}, slow_reader_timeout_s={limit})

memory = BodyMemory(2**24, has_tenants=False)

async def app(scope, receive, send):
    await read_json(Request(scope, receive), limits, memory.open(""))
    await send({{"type": "http.response.start", "status": 200, "headers": []}})
    for _ in range(200 if scope["path"] == "/large" else 1):
        await send({{"type": "http.response.body", "body": b"x" * 2**16, "more_body": True}})
    await send({{"type": "http.response.body", "body": b"end"}})

async def main():
    settings = IngressSettings(port={port}, header_timeout_s={limit}, keep_alive_s={limit})
    HttpServer(app, settings, limits).start()
    print("ready", flush=True)
    await asyncio.Event().wait()

uvloop.run(main())
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port = free_port()
    code = SERVER.format(port=port, limit=int(LIMIT_S))
    root = Path(__file__).parents[4]
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process, port
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.wait()
        process.stdout and process.stdout.close()


HEAD = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n"


def test_clients_of_a_server_that_was_paused_are_answered(server: tuple[subprocess.Popen[bytes], int]) -> None:
    """It stands still for twice the time that each has: for a head, a body, a next request, to read an answer."""
    process, port = server
    clients = {
        kind: [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(5)]
        for kind in ("head", "body", "next", "reader")
    }
    begun = {
        "head": HEAD[:20],
        "body": HEAD,
        "next": HEAD + b"{}",
        "reader": HEAD.replace(b"/x", b"/large") + b"{}",
    }
    rest = {"head": HEAD[20:] + b"{}", "body": b"{}", "next": HEAD + b"{}", "reader": b""}
    for kind, sockets in clients.items():
        for client in sockets:
            client.sendall(begun[kind])
            if kind == "next":
                until_end(client)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(PAUSE_S / 2)
    for kind, sockets in clients.items():
        for client in sockets:
            client.sendall(rest[kind])
    time.sleep(PAUSE_S / 2)
    os.kill(process.pid, signal.SIGCONT)
    for sockets in clients.values():
        for client in sockets:
            assert until_end(client).startswith(b"HTTP/1.1 200 OK")
            client.close()


def until_end(client: socket.socket) -> bytes:
    told = b""
    while not told.endswith(b"end\r\n0\r\n\r\n"):
        data = client.recv(2**20)
        assert data, f"the connection was ended after {told[-200:]!r}"
        told += data
    return told
