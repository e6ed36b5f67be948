"""The ingress's own HTTP server, with clients that are slow, too large, impatient, or there when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest
import uvloop

from benchmarks.private_ray import free_port
from deployments.api.http.body import ClientGone
from deployments.api.http.transport import until_disconnect
from deployments.config.limits import Limits
from deployments.config.settings import IngressSettings
from deployments.http_server import connection as connections
from deployments.ingress.http_server import HttpPortError, HttpServer, check_proxy
from tests.deployments.support.served_api import MAX_HEADER_BYTES, Api, error_of, limits, run_on, said, serving


def test_requests_are_answered_on_one_connection_after_the_other() -> None:
    async def scenario() -> None:
        async with serving(Api()) as (port, _), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            for size in (0, 10, 100_000):
                answer = await client.post("/", content=b"x" * size)
                assert (answer.text, "server" in answer.headers) == (str(size), False)

    asyncio.run(scenario())


def test_a_client_that_expects_100_gets_it_before_it_sends_its_body() -> None:
    async def scenario() -> None:
        async with serving(Api()) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 100")
            await reader.readline()
            writer.write(b"abc")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nhost: a\r\nx-slow: "])
def test_headers_that_do_not_come_in_time_end_the_connection(sent: bytes) -> None:
    async def scenario() -> None:
        async with serving(Api(), header_timeout_s=0.2) as (port, _):
            status, message = error_of(await said(port, sent))
            assert (status, "within 0.2 seconds" in message) == (408, True)

    asyncio.run(scenario())


def test_headers_without_end_are_refused_while_they_come() -> None:
    async def scenario() -> None:
        async with serving(Api()) as (port, _):
            status, message = error_of(await said(port, b"GET / HTTP/1.1\r\nx-large: ", b"x" * 3000))
            assert (status, "2000 bytes" in message) == (431, True)

    asyncio.run(scenario())


def test_headers_are_refused_in_the_form_of_the_path_they_are_for() -> None:
    async def scenario() -> None:
        async with serving(Api()) as (port, _):
            answer = await said(port, b"POST /v1/messages?beta=true HTTP/1.1\r\nx-large: ", b"x" * 3000)
            error = json.loads(answer.split(b"\r\n\r\n")[1])
            assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")

    asyncio.run(scenario())


NOT_HTTP = "The request is not HTTP/1.1 as this server can read it"
HTTP_2 = "This server speaks HTTP/1.1, and the connection began with HTTP/2"


@pytest.mark.parametrize(
    ("sent", "said_of_it"),
    [
        (b"\x00\xff nonsense\r\n\r\n", NOT_HTTP),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", NOT_HTTP),
        (b"GET / HTTP/9.9\r\n\r\n", NOT_HTTP),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % 10**30, NOT_HTTP),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", NOT_HTTP),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", HTTP_2),
        (b"GET http://[ HTTP/1.1\r\nhost: a\r\n\r\n", "'[' is not a host"),
    ],
)
def test_bytes_that_are_not_http_are_refused_with_an_error_object(sent: bytes, said_of_it: str) -> None:
    async def scenario() -> None:
        async with serving(Api()) as (port, _):
            status, message = error_of(await said(port, sent))
            assert status == 400
            assert message.startswith(said_of_it)

    asyncio.run(scenario())


def test_thousands_of_wishes_for_another_protocol_in_one_piece_are_answered() -> None:
    async def scenario() -> None:
        async with serving(Api()) as (port, _):
            one = b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
            answer = await said(port, one * 3000 + b"GET /y HTTP/1.0\r\n\r\n")
            assert answer.count(b"HTTP/1.1 200 OK") == 3001

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "sent", [b"CONNECT example.org:443 HTTP/1.1\r\nhost: a\r\n\r\n", b"CONNECT /x HTTP/1.1\r\n\r\n"]
)
def test_a_client_that_wants_a_tunnel_gets_none(sent: bytes) -> None:
    async def scenario() -> None:
        async with serving(Api()) as (port, _):
            status, message = error_of(await said(port, sent))
            assert status == 405 and "CONNECT" in message

    asyncio.run(scenario())


@pytest.mark.parametrize("head", [b"GET /x HTTP/1.0\r\n", b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"])
def test_a_request_for_an_upgrade_that_also_asks_to_close_is_answered_and_closed(head: bytes) -> None:
    async def scenario() -> None:
        async with serving(Api()) as (port, _):
            answer = await said(port, head + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 OK") and b"connection: close" in answer

    asyncio.run(scenario())


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.0"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_request_for_an_upgrade_is_answered_in_http_1(protocol: str, is_chunked: bool) -> None:
    """As JDK's HttpClient asks with each first request."""
    size = "transfer-encoding: chunked" if is_chunked else "content-length: 5"
    asks = f"connection: Upgrade, HTTP2-Settings\r\nupgrade: {protocol}\r\nhttp2-settings: AAMAAABk\r\n"
    head = f"POST /x HTTP/1.1\r\nhost: a\r\n{asks}{size}\r\n\r\n".encode()
    body = b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n" if is_chunked else b"hello"
    last = b"POST /y HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 3\r\n\r\nbye"

    async def scenario() -> None:
        async with serving(Api()) as (port, _):
            ways = [(head, body, last), (head + body + last,), (head[:40], head[40:] + body[:3], body[3:], last)]
            for parts in ways:
                answer = await said(port, *parts)
                assert [line for line in answer.split(b"\r\n") if line.startswith(b"HTTP/")] == [
                    b"HTTP/1.1 200 OK"
                ] * 2
                assert re.findall(rb"\r\n\r\n1\r\n(\d)\r\n0\r\n", answer) == [b"5", b"3"]

    asyncio.run(scenario())


def test_a_large_body_that_comes_with_the_headers_is_no_large_header() -> None:
    async def scenario() -> None:
        async with serving(Api()) as (port, _):
            body = b"x" * 50_000
            head = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 50000\r\n\r\n"
            assert (await said(port, head + body)).startswith(b"HTTP/1.1 200")

    asyncio.run(scenario())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_an_unread_body_ends_its_connection(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was answered before its body had come, which comes for as long as the client likes."""
    monkeypatch.setattr(connections, "LINGER_S", 0.2)

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    async def scenario() -> None:
        async with serving(refuse) as (port, server):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\nx")
            told = await asyncio.wait_for(reader.read(), 60)
            assert told.startswith(b"HTTP/1.1 401") and told.endswith(b"no")
            async with asyncio.timeout(60):
                while server.num_connections:
                    with contextlib.suppress(OSError):
                        writer.write(b"x")
                        await writer.drain()
                    await asyncio.sleep(0.02)
            writer.close()

    run_on(loop, scenario())


def test_a_client_that_sends_a_whole_unread_body_gets_the_answer() -> None:
    """Larger than what the kernel and the server hold of it: its client cannot read before it has sent all."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.3)  # the server reads no more of it meanwhile
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    async def scenario() -> None:
        async with serving(refuse) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 50000000\r\n\r\n" + bytes(50_000_000))
            async with asyncio.timeout(60):
                await writer.drain()
                assert (await reader.read()).endswith(b"no")
            writer.close()

    asyncio.run(scenario())


def test_a_request_whose_body_has_come_keeps_its_connection() -> None:
    async def scenario() -> None:
        async with serving(Api()) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(3):
                writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabc")
                assert b"connection" not in await reader.readuntil(b"\r\n0\r\n\r\n")
            writer.close()

    asyncio.run(scenario())


def test_a_server_that_drains_takes_no_connections_and_lets_answers_end() -> None:
    async def scenario() -> None:
        api = Api()
        async with serving(api) as (port, server):
            held = asyncio.create_task(said(port, b"GET /held HTTP/1.1\r\nhost: a\r\n\r\n"))
            while not api.num_open:
                await asyncio.sleep(0.01)
            drained = asyncio.create_task(server.drain())
            await refused(port)
            assert not drained.done()
            assert server.num_connections == 1
            api.go.set()
            await asyncio.wait_for(drained, 60)
            assert server.num_connections == 0
            assert b"begun," in await held

    asyncio.run(scenario())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("headers", [b"", b"connection: close\r\n"], ids=["keeps", "closes"])
@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_client_that_never_reads_is_given_up(
    loop: Callable[[], asyncio.AbstractEventLoop], headers: bytes, num_requests: int
) -> None:
    """However much it asked for, and whether or not its answers are complete."""

    async def scenario() -> None:
        async with serving(Large(), unread_s=0.2) as (port, _):
            with unread_socket(port) as client:
                client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n%b\r\n" % headers * num_requests)
                while not num_served(port):
                    await asyncio.sleep(0.01)
                async with asyncio.timeout(60):
                    while num_served(port):
                        await asyncio.sleep(0.05)

    run_on(loop, scenario())


class Large:
    """An ASGI application whose answers are larger than what the kernel holds for a connection."""

    SIZE = 64 * 2**20

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        length = (b"content-length", b"%d" % self.SIZE)
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": bytes(self.SIZE)})


def unread_socket(port: int) -> socket.socket:
    """Return a connection that holds little of what is not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", port))
    return client


def num_served(port: int) -> int:
    """Return the number of connections to a port of this process whose server's end is open."""
    return sum(bool(c.raddr) and c.laddr.port == port for c in psutil.Process().net_connections("tcp"))


def test_servers_share_a_port_and_one_that_ends_leaves_it_to_the_others() -> None:
    async def scenario() -> None:
        settings = IngressSettings(port=free_port())
        apis = [Api(), Api()]
        servers = [HttpServer(api, settings, limits()) for api in apis]
        for server in servers:
            server.start()
        request = b"GET /held HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        held = []
        while not all(api.num_open for api in apis):  # the kernel chooses by a hash of the addresses
            held.append(asyncio.create_task(said(settings.port, request)))
            await asyncio.sleep(0.01)
        for api in apis:
            api.go.set()
        await asyncio.gather(*held)
        await servers[0].drain()
        for _ in range(5):
            assert (await said(settings.port, request)).startswith(b"HTTP/1.1 200")
        await servers[1].drain()

    asyncio.run(scenario())


def test_a_port_that_another_program_uses_is_named() -> None:
    async def scenario() -> None:
        other = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(HttpPortError, match=rf"127\.0\.0\.1:{port}.*ingresses\.port"):
            HttpServer(Api(), IngressSettings(port=port), limits())
        other.close()

    asyncio.run(scenario())


def test_a_request_that_crosses_the_end_of_a_server_is_answered_as_its_connection_s_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that keeps its connections cannot know that one is about to be closed."""
    request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"

    monkeypatch.setattr(connections, "LAST_CALL_S", 60)

    async def scenario() -> None:
        api = Api()
        async with serving(api) as (port, server):
            idle = await asyncio.open_connection("127.0.0.1", port)
            busy = await asyncio.open_connection("127.0.0.1", port)
            assert b"connection" not in await answer(idle, request)
            busy[1].write(b"GET /held HTTP/1.1\r\nhost: a\r\n\r\n")
            await busy[0].readuntil(b"begun,")
            drained = asyncio.create_task(server.drain())
            await refused(port)
            api.go.set()
            await busy[0].readuntil(b"\r\n0\r\n\r\n")
            for connection in (idle, busy):
                assert b"connection: close" in await answer(connection, request)
                assert await connection[0].read() == b""
            await drained

    asyncio.run(scenario())


async def answer(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes) -> bytes:
    """Send a request on an open connection and return its answer, which is chunked."""
    connection[1].write(request)
    return await connection[0].readuntil(b"\r\n0\r\n\r\n")


async def refused(port: int) -> None:
    """Return when the server takes no connections."""
    with pytest.raises(OSError):
        while True:
            await said(port, b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")


def test_the_port_of_serve_s_proxy_is_refused_as_both_could_listen_on_it() -> None:
    check_proxy(8000, 8001)
    check_proxy(8000, None)
    with pytest.raises(HttpPortError, match="proxy_location: Disabled"):
        check_proxy(8000, 8000)


def test_work_for_a_client_that_leaves_is_cancelled_also_if_it_left_before() -> None:
    """The server says itself that the client has left, without a task that waits for it."""
    outcomes: list[str] = []

    async def scenario(is_early: bool) -> None:
        is_working, has_left = asyncio.Event(), asyncio.Event()

        async def api(scope: Any, receive: Any, send: Any) -> None:
            is_working.set()
            if is_early:
                while (await receive())["type"] != "http.disconnect":
                    pass
            try:
                await until_disconnect(scope, receive, asyncio.sleep(3600))
            except ClientGone:
                outcomes.append("gone")
            has_left.set()

        async with serving(api) as (port, _):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            await is_working.wait()
            writer.close()
            async with asyncio.timeout(60):
                await has_left.wait()

    asyncio.run(scenario(is_early=False))
    asyncio.run(scenario(is_early=True))
    assert outcomes == ["gone", "gone"]


def test_new_limits_bound_the_connections_that_come_then() -> None:
    async def scenario() -> None:
        async with serving(Api()) as (port, server):
            begun = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: " + b"a" * 2 * MAX_HEADER_BYTES
            assert (await said(port, begun)).startswith(b"HTTP/1.1 431")
            server.take_over(Limits(max_header_bytes=4 * MAX_HEADER_BYTES))
            assert (await said(port, begun, b"\r\n\r\n")).startswith(b"HTTP/1.1 200")

    asyncio.run(scenario())


@pytest.mark.parametrize("framing", [b"content-length: 9", b"transfer-encoding: chunked"])
@pytest.mark.parametrize("more", [b"", b"rest"], ids=["the body never comes", "the body comes meanwhile"])
def test_an_answer_before_the_body_announces_the_end_of_the_connection(framing: bytes, more: bytes) -> None:
    """Else a client that keeps its connection would send its next request on one that is closed."""
    rest = more and (b"123456789" if b"length" in framing else b"1\r\na\r\n0\r\n\r\n")

    async def scenario() -> None:
        go = asyncio.Event()

        async def refuse(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
            await go.wait()
            await send({"type": "http.response.body", "body": b"no"})

        async with serving(refuse) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\n%b\r\n\r\n" % framing)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            assert head.startswith(b"HTTP/1.1 401") and b"connection: close" in head
            writer.write(rest)
            await asyncio.sleep(0.01)
            go.set()
            assert await asyncio.wait_for(reader.read(), 60) == b"no"
            writer.close()

    asyncio.run(scenario())


def test_a_client_that_reads_less_than_the_rate_is_given_up() -> None:
    async def scenario() -> None:
        async with serving(Large(), unread_s=0.2, min_bytes_per_s=1e12) as (port, _):
            with unread_socket(port) as client:
                client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
                while not num_served(port):
                    await asyncio.sleep(0.01)
                client.setblocking(False)
                async with asyncio.timeout(60):
                    while num_served(port):
                        with contextlib.suppress(OSError):
                            client.recv(1000)
                        await asyncio.sleep(0.05)

    asyncio.run(scenario())


def test_a_client_of_a_silent_stream_is_not_given_up() -> None:
    async def scenario() -> None:
        api = Api()
        async with serving(api, unread_s=0.05, min_bytes_per_s=1e12) as (port, _):
            told = asyncio.create_task(said(port, b"GET /held HTTP/1.0\r\n\r\n"))
            while not api.num_open:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            api.go.set()
            assert (await told).endswith(b"begun,\r\n1\r\n0\r\n0\r\n\r\n")

    asyncio.run(scenario())
