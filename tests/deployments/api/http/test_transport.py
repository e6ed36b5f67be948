"""Work for a client ends when the client leaves, and only then."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from deployments.api.http.body import ClientGone
from deployments.api.http.transport import until_disconnect


class Connection:
    """A connection whose client leaves when `has_left` is set."""

    def __init__(self) -> None:
        self.has_left = asyncio.Event()
        self.num_waiting = 0

    async def receive(self) -> Message:
        self.num_waiting += 1
        try:
            await self.has_left.wait()
        finally:
            self.num_waiting -= 1
        return {"type": "http.disconnect"}


def test_work_is_cancelled_where_it_waits_when_the_client_leaves() -> None:
    async def scenario() -> None:
        connection, was_cancelled = Connection(), False

        async def work() -> None:
            nonlocal was_cancelled
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                was_cancelled = True
                raise

        asyncio.get_running_loop().call_later(0.01, connection.has_left.set)
        with pytest.raises(ClientGone):
            await until_disconnect(connection.receive, work())
        assert was_cancelled
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()  # what follows can wait and set time limits as before

    asyncio.run(scenario())


def test_work_that_is_done_leaves_nobody_waiting_for_the_client() -> None:
    async def scenario() -> None:
        connection = Connection()

        async def work() -> str:
            await asyncio.sleep(0.01)
            assert connection.num_waiting == 1
            return "answer"

        assert await until_disconnect(connection.receive, work()) == "answer"
        await asyncio.sleep(0)
        assert connection.num_waiting == 0

    asyncio.run(scenario())


def test_a_server_that_ends_the_request_itself_is_not_taken_for_a_client_that_left() -> None:
    async def scenario() -> None:
        connection = Connection()
        request = asyncio.create_task(until_disconnect(connection.receive, asyncio.sleep(60)))
        await asyncio.sleep(0.01)
        connection.has_left.set()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    asyncio.run(scenario())
