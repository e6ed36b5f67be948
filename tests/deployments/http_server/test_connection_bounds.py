"""What a client sends outside of bodies is bounded, and so is what a connection holds and leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import socket
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from deployments.api.http.body import ClientGone
from deployments.api.http.transport import until_disconnect
from deployments.http_server.connection import Connection
from tests.deployments.support.served_api import Api, error_of, run_on, said, serving

GET = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
Loop = Callable[[], asyncio.AbstractEventLoop]


# --- trailers and chunks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_slow", [False, True])
def test_trailers_never_become_headers(is_slow: bool) -> None:
    trailers = b"x-api-key: KEY\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    sent = CHUNKED + b"3\r\nabc\r\n0\r\n%b\r\n" % trailers

    async def scenario() -> None:
        api = Api()
        async with serving(api) as (port, _):
            last = b"GET /y HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
            parts = [bytes([byte]) for byte in sent + last] if is_slow else [sent + last]
            assert re.findall(rb"\r\n\r\n1\r\n(\d)\r\n0\r\n", await said(port, *parts)) == [b"3", b"0"]
        assert api.headers[0] == [(b"host", b"a"), (b"transfer-encoding", b"chunked")]
        assert api.paths == ["/x", "/y"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /x HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 1000,
        b"GET /x HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 100_000,
        b"GET /x HTTP/1.1\r\nhost: a\r\n" + b"y" * 100_000,
        b"GET /" + b"y" * 100_000,
        b"\r\n" * 3000,
        CHUNKED + b"3\r\nabc\r\n0\r\n" + b"a:b\r\n" * 20_000,
        CHUNKED + b"3\r\nabc\r\n0\r\na: " + b"b" * 1_000_000,
        CHUNKED + b"3\r\nabc\r\n0\r\n" + b"b" * 100_000,
        CHUNKED + b"3;" + b"x" * 100_000,
        CHUNKED + b"3;a=" + b"x" * 100_000,
        CHUNKED + (b"1;" + b"x" * 500 + b"\r\na\r\n") * 100,
    ],
)
def test_bytes_outside_of_bodies_are_bounded(sent: bytes) -> None:
    """However they come: the answer is a 431, also if the request's endpoint waits for its body."""

    async def scenario() -> None:
        async with serving(Api()) as (port, _):
            for parts in ([sent], [sent[at : at + 700] for at in range(0, len(sent), 700)]):
                told = b""
                with contextlib.suppress(ConnectionError):  # its client may send on after the end
                    told = await said(port, *parts)
                assert not told or error_of(told)[0] == 431
            assert error_of(await said(port, sent[:4000]))[0] == 431

    asyncio.run(scenario())


def test_more_headers_than_allowed_are_refused_before_they_end() -> None:
    async def scenario() -> None:
        async with serving(Api()) as (port, _):
            status, message = error_of(await said(port, b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 102))
            assert (status, "100 headers (limits.max_headers)" in message) == (431, True)

    asyncio.run(scenario())


def test_the_overhead_of_chunks_is_not_counted() -> None:
    """Most clients send what they write, however short it is, as a chunk."""

    async def scenario() -> None:
        async with serving(Api()) as (port, _):
            body = b"1\r\na\r\n" * 5000 + b"3E8\r\n%b\r\n" % (b"\r\n\r\n" * 250) + b"0\r\nmd5: x\r\n\r\n"
            told = await said(port, CHUNKED + body + b"GET /x HTTP/1.0\r\n\r\n")
            assert told.count(b"HTTP/1.1 200 OK") == 2
            assert b"\r\n6000\r\n" in told

    asyncio.run(scenario())


# --- malformed bodies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"x\r\n",
        b"-1\r\n",
        b" 1\r\n",
        b"1 \r\na\r\n",
        b"0x1\r\na\r\n",
        b"1\na\n",
        b"1\r\nab\r\n",
        b"1\r\na\n0\r\n\r\n",
        b"\r\n\r\n",
        b"1\r\na\r\n\r\n",
        b"ffffffffffffffffff\r\n",
        b"1;\x00\r\n",
        b"1\r\na\r\n0\r\nno colon\r\n\r\n",
        b"1\r\na\r\n0\r\n a: b\r\n\r\n",
        b"1\r\na\r\n0\r\na : b\r\n\r\n",
        b"1\r\na\r\n0\r\na: \x00\r\n\r\n",
        b"1\r\na\r\n0\r\na: b\n\r\n",
        b"1\r\na\r\n0\n\n",
        b"1\r\na\r\n0\r\nGET / HTTP/1.1\r\n\r\n",
    ],
)
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_malformed_body_is_answered_while_its_endpoint_waits_for_it(body: bytes, is_slow: bool) -> None:
    async def scenario() -> None:
        outcomes: list[str] = []
        waits = asyncio.Event()

        async def api(scope: Any, receive: Any, send: Any) -> None:
            waits.set()
            has_more = True
            while has_more:
                message = await receive()
                has_more = message.get("more_body", False)
            outcomes.append(message["type"])
            with contextlib.suppress(ClientGone):
                await until_disconnect(scope, receive, asyncio.sleep(60))
                outcomes.append("worked")

        async with serving(api) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(CHUNKED if is_slow else CHUNKED + body)
            await waits.wait() if is_slow else None
            writer.write(body if is_slow else b"")
            status, message = error_of(await asyncio.wait_for(reader.read(), 60))
            assert (status, message.startswith("The request is not HTTP/1.1")) == (400, True)
            writer.close()
        assert outcomes in ([], ["http.disconnect"])

    asyncio.run(scenario())


# --- pipelines -------------------------------------------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize("first", [b"", CHUNKED + b"1\r\na\r\n0\r\n\r\n"], ids=["GET", "chunked"])
def test_a_request_is_parsed_when_the_one_before_it_is_answered(loop: Loop, first: bytes) -> None:
    async def scenario() -> None:
        api = Api()
        async with serving(api) as (port, _):
            last = b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
            told = asyncio.create_task(said(port, first + GET.replace(b"/x", b"/held") + GET * 2000 + last))
            while "/held" not in api.paths:
                await asyncio.sleep(0)
            await until_idle()
            assert api.paths[-1] == "/held"
            api.go.set()
            assert (await told).count(b"HTTP/1.1 200 OK") == len(api.paths) == 2002 + bool(first)

    run_on(loop, scenario())


async def until_idle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


@LOOPS
@pytest.mark.parametrize(
    "sent",
    [
        GET * 40_000,
        b"\r\n" * 400_000,
        b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n" + bytes(1_000_000),
        CHUNKED + b"1\r\na\r\n" * 200_000,
    ],
    ids=["requests", "blank lines", "a body", "chunks"],
)
def test_little_is_held_of_a_request_that_waits_for_an_answer(loop: Loop, sent: bytes) -> None:
    """Ten clients send a megabyte each after a request whose answer does not end."""
    num_clients = 10

    async def scenario() -> None:
        api = Api()
        async with serving(api) as (port, server):
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_clients)]
            for client in clients:
                client.setblocking(False)
            while server.num_connections < num_clients:
                await asyncio.sleep(0.01)
            gc.collect()
            with traced():
                for client in clients:
                    client.send(GET.replace(b"/x", b"/held"))
                left = dict.fromkeys(clients, memoryview(sent))
                for _ in range(300):
                    for client, data in left.items():
                        with contextlib.suppress(BlockingIOError):
                            left[client] = data[client.send(data[:65536]) :]
                    await asyncio.sleep(0)
                assert api.num_open == num_clients
                assert tracemalloc.get_traced_memory()[0] < num_clients * 150_000
            for client in clients:
                client.close()
            api.go.set()

    run_on(loop, scenario())


@contextlib.contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


# --- the end ---------------------------------------------------------------------------------------------------

ENDINGS = {
    "silent": b"",
    "in a head": GET[:-5],
    "idle": GET,
    "in a body": b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nabc",
    "in a chunk": CHUNKED + b"9\r\nabc",
    "in trailers": CHUNKED + b"3\r\nabc\r\n0\r\na: b",
    "with more requests": GET.replace(b"/x", b"/held") + GET * 5000,
    "refused": b"nonsense\r\n\r\n",
    "after an upgrade": b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    "of a malformed body": CHUNKED + b"x\r\n",
}


@LOOPS
@pytest.mark.parametrize("sent", ENDINGS.values(), ids=ENDINGS.keys())
def test_a_connection_that_has_ended_is_freed_without_a_collection(loop: Loop, sent: bytes) -> None:
    class Mark:
        pass

    async def scenario() -> None:
        api, marks = Api(), list[weakref.ref[Mark]]()

        async def marking(scope: Any, receive: Any, send: Any) -> None:
            mark = scope["mark"] = Mark()
            marks.append(weakref.ref(mark))
            with contextlib.suppress(ClientGone):
                await until_disconnect(scope, receive, api(scope, receive, send))

        async with serving(marking) as (port, server):
            for _ in range(3):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                while not server.num_connections:
                    await asyncio.sleep(0.01)
                await until_idle()
                writer.transport.abort()
                await asyncio.sleep(0.01)
                api.go.set()  # while nothing more is read, only an answer finds that its client has left
                while server.num_connections:
                    await asyncio.sleep(0.01)
                api.go.clear()
            await until_idle()
            kept = [held for held in gc.get_objects() if isinstance(held, Connection | RequestResponseCycle)]
            assert (kept, [mark for mark in marks if mark() is not None]) == ([], [])

    gc.collect()
    gc.disable()
    try:
        run_on(loop, scenario())
    finally:
        gc.enable()


def test_a_connection_that_sends_only_line_ends_is_ended_too() -> None:
    """They begin no request, and the client has not been idle either."""

    async def scenario() -> None:
        async with serving(Api(), header_timeout_s=0.2, keep_alive_s=60) as (port, _):
            told = await said(port, GET + b"\r\n")
            assert told.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in told

    asyncio.run(scenario())
