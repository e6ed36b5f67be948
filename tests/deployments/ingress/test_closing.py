"""A listener that closes loses no connection: the kernel would reset those that wait in its queue."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import uvloop

from benchmarks.private_ray import free_port
from deployments.ingress.closing import take_queued
from deployments.ingress.http_server import take_port

NUM_CLIENTS = 64
RUNS = (asyncio.run, uvloop.run)


class Greeter(asyncio.Protocol):
    """Says its server's name to whoever connects, and hangs up."""

    def __init__(self, name: bytes) -> None:
        self._name = name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._name)
        transport.close()


async def listen(host: str, port: int, name: bytes) -> tuple[socket.socket, asyncio.Server]:
    listener = take_port(host, port)
    listener.listen(2 * NUM_CLIENTS)
    return listener, await asyncio.get_running_loop().create_server(lambda: Greeter(name), sock=listener)


def connect(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), timeout=60)


async def heard_by(clients: Iterable[socket.socket]) -> set[bytes]:
    """What any of the clients is told."""
    return set(await asyncio.to_thread(lambda: [heard(client) for client in clients]))


def heard(client: socket.socket) -> bytes:
    """What a client is told until the connection ends; b"reset" where it is reset."""
    with client:
        try:
            return client.recv(100)
        except ConnectionResetError:
            return b"reset"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("run", RUNS, ids=["asyncio", "uvloop"])
def test_connections_in_the_queue_are_accepted_before_it_closes(run: Callable[..., Any], host: str) -> None:
    """The event loop accepts nothing while clients connect, so all of them wait in the queue."""

    async def scenario(*, takes_queued: bool) -> set[bytes]:
        port = free_port()
        listener, server = await listen(host, port, b"hello")
        clients = [connect(host, port) for _ in range(NUM_CLIENTS)]
        if takes_queued:
            await take_queued(listener)
        server.close()
        listener.close()
        return await heard_by(clients)

    async def both() -> None:
        assert await scenario(takes_queued=True) == {b"hello"}
        assert b"reset" in await scenario(takes_queued=False)  # or this tests nothing

    run(both())


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
@pytest.mark.parametrize("run", RUNS, ids=["asyncio", "uvloop"])
def test_a_client_that_connects_during_the_close_reaches_another_listener_of_the_port(
    run: Callable[..., Any],
) -> None:
    async def scenario() -> None:
        port = free_port()
        old, old_server = await listen("127.0.0.1", port, b"old")
        new, new_server = await listen("127.0.0.1", port, b"new")
        closing = asyncio.create_task(take_queued(old))
        await asyncio.sleep(0)  # from now on it takes no handshake
        connecting = [asyncio.to_thread(connect, "127.0.0.1", port) for _ in range(NUM_CLIENTS)]
        clients = asyncio.gather(*connecting)
        await closing
        old_server.close()
        old.close()
        assert await heard_by(await clients) == {b"new"}
        new_server.close()
        new.close()

    run(scenario())


def test_a_queue_that_is_never_empty_does_not_hold_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process has no descriptor left to accept with."""
    monkeypatch.setattr("deployments.ingress.closing.ACCEPT_S", 0.0)

    async def scenario() -> None:
        with take_port("127.0.0.1", free_port()) as listener:
            listener.listen(8)
            with connect(*listener.getsockname()):
                await take_queued(listener)  # nobody accepts

    asyncio.run(scenario())
