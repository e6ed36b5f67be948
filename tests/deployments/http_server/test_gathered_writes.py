"""One turn of the event loop is one write, and a connection that closes has written everything."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from deployments.http_server.gathered_writes import GatheredWrites
from tests.deployments.support.virtual_time import run


class Recorded:
    """A transport that keeps what is done to it."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.done.append("closed")

    def is_closing(self) -> bool:
        return "closed" in self.done

    def pause_reading(self) -> None:
        self.done.append("paused")


def gathered() -> tuple[Recorded, GatheredWrites]:
    transport = Recorded()
    return transport, GatheredWrites(cast(asyncio.Transport, transport), asyncio.get_running_loop(), lambda: True)


def test_all_writes_of_one_turn_are_one_write() -> None:
    async def scenario() -> None:
        transport, writes = gathered()
        for data in (b"head", b"event", b"end"):
            writes.write(data)
        assert transport.done == []
        await asyncio.sleep(0)
        writes.write(b"next")
        await asyncio.sleep(0)
        assert transport.done == [b"headeventend", b"next"]

    run(scenario())


def test_gathered_data_is_written_before_the_connection_closes_and_nothing_after() -> None:
    async def scenario() -> None:
        transport, writes = gathered()
        writes.write(b"last")
        writes.close()
        writes.write(b"lost")
        await asyncio.sleep(0)
        assert transport.done == [b"last", "closed"]

    run(scenario())


def test_everything_else_is_the_transport_s() -> None:
    async def scenario() -> None:
        transport, writes = gathered()
        writes.pause_reading()
        assert transport.done == ["paused"] and not writes.is_closing()

    run(scenario())
