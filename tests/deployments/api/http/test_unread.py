"""Answers that wait for their clients to read them take room, and what finds none is refused."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from starlette.types import Message, Scope

from benchmarks import loop_gap_cases
from benchmarks.loop_gap_cases import RESPONSES, large_answers
from benchmarks.loop_gaps import application, post
from deployments.api import Limits
from deployments.api.base.errors import ApiError
from deployments.api.batches.files import FileContent
from deployments.api.http import unread
from deployments.api.http.access import as_tenant
from deployments.api.http.parts import PART_BYTES
from deployments.api.http.scopes import NO_READER
from deployments.api.http.transport import EventStream, json_in_pieces
from deployments.api.http.unread import SMALL_BYTES, Readers, UnreadMemory
from deployments.config.tenants import Tenant
from tests.deployments.support.served_api import run_on, serving

LARGE = b"x" * 8_000_000
"""More than the kernel holds for a connection that nobody reads."""
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


async def nothing() -> None:
    pass


class Reader:
    """A client that reads a message whenever `go` is set, for a request that is not over ASGI's server."""

    def __init__(self, **scope: Any) -> None:
        self.scope: Scope = {"type": "http", "method": "GET", "path": "/", "headers": [], **scope}
        self.messages: list[Message] = []
        self.go = asyncio.Event()

    async def send(self, message: Message) -> None:
        await self.go.wait()
        self.messages.append(message)

    async def receive(self) -> Message:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    def ask(self, app: Any) -> asyncio.Task[None]:
        return asyncio.create_task(app(self.scope, self.receive, self.send))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0)


@LOOPS
def test_unread_answers_are_bounded_for_each_address_and_a_read_one_makes_room(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Each address may hold three quarters of 32 MiB: three answers of 8 MB."""
    port = 0
    memory = UnreadMemory(2**25, has_tenants=False)

    async def api(scope: Any, receive: Any, send: Any) -> None:
        await json_in_pieces([LARGE])(scope, receive, send)

    async def asked(address: str = "127.0.0.1") -> tuple[socket.socket, bytes]:
        """Ask, read the status and leave the rest."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.bind((address, 0))
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        client.send(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        status = b""
        while len(status) < 12:
            status += await asyncio.get_running_loop().sock_recv(client, 12 - len(status))
        return client, status[9:]

    async def rest_of(client: socket.socket) -> bytes:
        found = bytearray()
        while data := await asyncio.get_running_loop().sock_recv(client, 2**20):
            found += data
        client.close()
        return bytes(found)

    async def scenario() -> None:
        nonlocal port
        async with serving(Readers(api, memory, has_tenants=False)) as (port, _):
            held = [await asked() for _ in range(3)]
            assert [status for _, status in held] == [b"200"] * 3 and memory.num_bytes == 3 * len(LARGE)
            client, status = await asked()
            told = await rest_of(client)
            assert status == b"429" and b"retry-after: 2" in told and b"limits.max_unread_bytes" in told
            other, status = await asked("127.0.0.2")
            assert status == b"200" and (await rest_of(other)).endswith(LARGE)
            assert (await rest_of(held[0][0])).endswith(LARGE)  # it waited whole
            await until(lambda: memory.num_bytes == 2 * len(LARGE))
            held[1][0].close()
            await until(lambda: memory.num_bytes == len(LARGE))
            for client, status in (await asked(), await asked()):
                assert status == b"200"
                client.close()
            held[2][0].close()
            await until(lambda: not memory.num_bytes)

    run_on(loop, scenario())


def test_a_whole_answer_holds_its_room_until_its_last_part_was_read() -> None:
    async def scenario() -> None:
        memory, reader = UnreadMemory(2**24, has_tenants=False), Reader()
        asked = reader.ask(Readers(json_in_pieces([LARGE], None, 7), memory, has_tenants=False))
        await until(lambda: memory.num_bytes == len(LARGE) + 7)
        reader.go.set()
        await asked
        assert reader.body == LARGE and memory.num_bytes == 0
        assert max(len(message.get("body", b"")) for message in reader.messages) == PART_BYTES

    asyncio.run(scenario())


def test_tenants_have_room_of_their_own_wherever_they_come_from() -> None:
    async def scenario() -> None:
        memory = UnreadMemory(2**25, has_tenants=True)
        app = Readers(json_in_pieces([LARGE]), memory, has_tenants=True)
        readers = [
            Reader(**as_tenant({"client": (f"10.0.0.{n}", 1)}, Tenant(name))) for n, name in enumerate("aaab")
        ]
        asked = [reader.ask(app) for reader in readers]
        await until(lambda: memory.num_bytes == 3 * len(LARGE))
        for reader in readers:
            reader.go.set()
        await asyncio.gather(*asked)
        assert [reader.status for reader in readers] == [200, 200, 429, 200]

    asyncio.run(scenario())


def test_an_answer_that_no_client_could_read_whole_is_not_to_be_tried_again() -> None:
    async def scenario() -> None:
        reader = Reader()
        reader.go.set()
        memory = UnreadMemory(2**20, has_tenants=False)
        await reader.ask(Readers(json_in_pieces([LARGE]), memory, has_tenants=False))
        error = json.loads(reader.body)["error"]
        assert (reader.status, error["code"]) == (400, "answer_too_large")
        assert "8000000 bytes" in error["message"] and "limits.max_unread_bytes" in error["message"]

    asyncio.run(scenario())


def test_a_small_answer_and_one_that_no_client_reads_take_no_room() -> None:
    async def scenario() -> None:
        memory = UnreadMemory(2**20, has_tenants=False)
        with memory.open("") as other:
            other.take(2**20 - 2**18)
            for response, scope in (
                (json_in_pieces([LARGE]), {NO_READER: True}),
                (json_in_pieces([b"x" * SMALL_BYTES]), {}),
                (stream_of(b"x" * SMALL_BYTES), {}),
            ):
                reader = Reader(**scope)
                reader.go.set()
                await reader.ask(Readers(response, memory, has_tenants=False))
                assert reader.status == 200

    asyncio.run(scenario())


# --- streams ---------------------------------------------------------------------------------------------------


def stream_of(*chunks: bytes, last_words: bytes | None = None) -> EventStream:
    """A stream that says `last_words` when it fails; None: it says nothing then."""

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            for chunk in chunks:
                yield chunk
        except ApiError:
            if last_words is None:
                raise
            yield last_words

    return EventStream(events(), nothing, 60.0, {})


def test_a_large_event_takes_room_while_it_is_read() -> None:
    async def scenario() -> None:
        memory, reader, sizes = UnreadMemory(2**24, has_tenants=False), Reader(), list[int]()

        async def events() -> AsyncGenerator[bytes, None]:
            yield b"first"
            reader.go.clear()
            yield LARGE
            sizes.append(memory.num_bytes)
            yield b"last"

        asked = reader.ask(Readers(EventStream(events(), nothing, 60.0, {}, 5), memory, has_tenants=False))
        reader.go.set()
        await until(lambda: memory.num_bytes == 5 + len(LARGE))
        assert not asked.done()
        reader.go.set()
        await asked
        assert reader.body == b"first" + LARGE + b"last" and sizes == [5] and memory.num_bytes == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("last_words", [b"error", None, LARGE], ids=["words", "none", "too many"])
def test_a_large_event_that_finds_no_room_ends_its_stream(last_words: bytes | None) -> None:
    async def scenario() -> None:
        memory, reader = UnreadMemory(2**24, has_tenants=False), Reader()
        reader.go.set()
        with memory.open("") as other:
            other.take(2**23)
            stream = stream_of(b"first", LARGE, b"last", last_words=last_words)
            await reader.ask(Readers(stream, memory, has_tenants=False))
            assert memory.num_bytes == 2**23
        is_told = last_words == b"error"
        assert reader.body == (b"firsterror" if is_told else b"first")
        assert (reader.messages[-1].get("more_body") is False) == is_told  # else the server ends the connection

    asyncio.run(scenario())


def test_a_stream_whose_events_are_kept_begins_only_with_room_for_them() -> None:
    async def scenario() -> None:
        memory, reader, closed = UnreadMemory(2**24, has_tenants=False), Reader(), asyncio.Event()
        reader.go.set()

        async def close() -> None:
            closed.set()

        async def events() -> AsyncGenerator[bytes, None]:
            yield b"first"

        with memory.open("") as other:
            other.take(2**23)
            stream = EventStream(events(), close, 60.0, {}, len(LARGE))
            await reader.ask(Readers(stream, memory, has_tenants=False))
        assert reader.status == 429 and closed.is_set() and memory.num_bytes == 0

    asyncio.run(scenario())


# --- the API ---------------------------------------------------------------------------------------------------


def test_every_large_answer_of_the_api_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones are refused when there is no room for them, and streams end with an error."""
    made: list[UnreadMemory] = []

    def memory(max_bytes: int, *, has_tenants: bool) -> UnreadMemory:
        made.append(unread.UnreadMemory(max_bytes, has_tenants=has_tenants))
        return made[-1]

    monkeypatch.setattr("deployments.api.service.workroom.UnreadMemory", memory)
    monkeypatch.setattr(loop_gap_cases, "LONG_ANSWER", 12_000)
    limits = Limits(max_unread_bytes=2**28)
    app = application(limits, context=131_072)

    async def scenario() -> None:
        for case in large_answers():
            with made[0].open("") as other:
                other.take(3 * 2**26 - 100)
                status, sent = await post(app, case)
            told, is_stream = b"".join(sent), b'"stream":true' in case.body
            assert status == (200 if is_stream else 429), case
            if (
                is_stream and case.path == RESPONSES
            ):  # its last words repeat what the answer has, so they are large
                assert told == b""
            else:
                assert b"limits.max_unread_bytes" in told and len(told) < 2**16
            assert made[0].num_bytes == 0

    asyncio.run(scenario())


def test_a_file_is_read_from_disk_as_far_as_its_client_reads_it(tmp_path: Path) -> None:
    """However large it is, it takes no room."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 1000)

    async def scenario() -> None:
        memory, reader = UnreadMemory(2**20, has_tenants=False), Reader()
        reader.go.set()
        with memory.open("") as other:
            other.take(2**19)
            await reader.ask(Readers(FileContent(path), memory, has_tenants=False))
        assert reader.body == path.read_bytes()
        assert max(len(message.get("body", b"")) for message in reader.messages) == SMALL_BYTES

    asyncio.run(scenario())
