"""Work for a client ends when the client leaves, and only then; what is large is sent in parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response
from starlette.types import Message

from deployments.api.http.body import ClientGone
from deployments.api.http.parts import PART_BYTES, parts_of
from deployments.api.http.transport import ON_DISCONNECT, EventStream, json_in_pieces, until_disconnect

both_ways = pytest.mark.parametrize("tells_itself", [False, True])


class Connection:
    """A connection whose client leaves when `leave` is called, as ASGI tells it or as a server of ours does."""

    def __init__(self, tells_itself: bool) -> None:
        self.has_left = asyncio.Event()
        self.num_waiting = 0
        self.scope: dict[str, Any] = {ON_DISCONNECT: self._watch} if tells_itself else {}
        self._callbacks: list[Callable[[], None]] = []

    def leave(self) -> None:
        self.has_left.set()
        for callback in self._callbacks:
            callback()

    def _watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        self.num_waiting += 1

        def unwatch() -> None:
            self._callbacks.remove(callback)
            self.num_waiting -= 1

        return unwatch

    async def receive(self) -> Message:
        self.num_waiting += 1
        try:
            await self.has_left.wait()
        finally:
            self.num_waiting -= 1
        return {"type": "http.disconnect"}


@both_ways
def test_work_is_cancelled_where_it_waits_when_the_client_leaves(tells_itself: bool) -> None:
    async def scenario() -> None:
        connection, was_cancelled = Connection(tells_itself), False

        async def work() -> None:
            nonlocal was_cancelled
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                was_cancelled = True
                raise

        asyncio.get_running_loop().call_later(0.01, connection.leave)
        with pytest.raises(ClientGone):
            await until_disconnect(connection.scope, connection.receive, work())
        assert was_cancelled
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()  # what follows can wait and set time limits as before

    asyncio.run(scenario())


@both_ways
def test_finished_work_leaves_no_task_waiting_for_the_client(tells_itself: bool) -> None:
    async def scenario() -> None:
        connection = Connection(tells_itself)

        async def work() -> str:
            await asyncio.sleep(0.01)
            assert connection.num_waiting == 1
            return "answer"

        assert await until_disconnect(connection.scope, connection.receive, work()) == "answer"
        await asyncio.sleep(0)
        assert connection.num_waiting == 0

    asyncio.run(scenario())


@both_ways
def test_a_server_that_ends_the_request_itself_is_not_taken_for_a_client_that_left(tells_itself: bool) -> None:
    async def scenario() -> None:
        connection = Connection(tells_itself)
        request = asyncio.create_task(until_disconnect(connection.scope, connection.receive, asyncio.sleep(60)))
        await asyncio.sleep(0.01)
        connection.leave()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    asyncio.run(scenario())


@given(st.lists(st.integers(0, 5 * PART_BYTES // 2), max_size=6))
def test_parts_are_the_pieces_in_order_and_none_is_large(sizes: list[int]) -> None:
    pieces = [bytes([at]) * size for at, size in enumerate(sizes)]
    parts = list(parts_of(pieces))
    assert b"".join(parts) == b"".join(pieces)
    assert all(len(part) == PART_BYTES for part in parts[:-1]) and all(
        0 < len(part) <= PART_BYTES for part in parts
    )


class Sent:
    """What a response sends, and in which turn of the event loop; its client may leave after some messages."""

    def __init__(self, response: Response, connection: Connection, leaves_after: int | None = None) -> None:
        self.messages: list[Message] = []
        self.turns: list[int] = []
        self.num_turns = 0
        self._response, self._connection, self._leaves_after = response, connection, leaves_after

    async def __call__(self) -> None:
        other = asyncio.create_task(self._count())
        await self._response(self._connection.scope | {"type": "http"}, self._connection.receive, self._send)
        other.cancel()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    async def _send(self, message: Message) -> None:
        self.messages.append(message)
        if message.get("body"):
            self.turns.append(self.num_turns)
        if len(self.messages) == self._leaves_after:
            self._connection.leave()

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.num_turns += 1


def stream_of(*chunks: bytes) -> Response:
    async def events() -> AsyncGenerator[bytes, None]:
        for chunk in chunks:
            yield chunk

    async def close() -> None:
        pass

    return EventStream(events(), close, 60.0, {})


LONG = [b"[" + b"1," * PART_BYTES, b"2," * 10, b"3" * 3 * PART_BYTES + b"]"]


@pytest.mark.parametrize("make", [lambda: json_in_pieces(LONG), lambda: stream_of(b"".join(LONG))])
def test_a_turn_of_the_loop_sends_a_part_of_a_large_answer(make: Callable[[], Response]) -> None:
    async def scenario() -> None:
        sent = Sent(make(), Connection(tells_itself=True))
        await sent()
        assert sent.body == b"".join(LONG) and sent.messages[-1] == {
            "type": "http.response.body", "body": b"", "more_body": False
        }  # fmt: skip
        assert max(len(message.get("body", b"")) for message in sent.messages) == PART_BYTES
        assert len(sent.turns) > 5 and len(set(sent.turns)) >= len(sent.turns) - 1

    asyncio.run(scenario())


def test_an_answer_in_pieces_has_its_length_and_headers() -> None:
    async def scenario() -> None:
        for pieces in ([b"{", b"}"], LONG):
            sent = Sent(json_in_pieces(pieces, {"x-a": "b"}), Connection(tells_itself=True))
            await sent()
            assert dict(sent.messages[0]["headers"]) == {
                b"x-a": b"b", b"content-type": b"application/json",
                b"content-length": str(sum(map(len, pieces))).encode(),
            }  # fmt: skip
            assert sent.body == b"".join(pieces)

    asyncio.run(scenario())


@both_ways
def test_no_more_parts_are_sent_to_a_client_that_left(tells_itself: bool) -> None:
    async def scenario() -> None:
        connection = Connection(tells_itself)
        sent = Sent(json_in_pieces(LONG), connection, leaves_after=3)
        await sent()
        assert 3 <= len(sent.messages) < 6 and connection.num_waiting == 0

    asyncio.run(scenario())
