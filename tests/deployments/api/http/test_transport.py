"""Work for a client ends when the client leaves, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message

from deployments.api.http.body import ClientGone
from deployments.api.http.transport import ON_DISCONNECT, until_disconnect

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
def test_work_that_is_done_leaves_nobody_waiting_for_the_client(tells_itself: bool) -> None:
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
