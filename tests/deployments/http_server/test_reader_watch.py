"""A client that reads nothing loses its connection, and one that reads slowly does not."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from deployments.http_server.gathered_writes import GatheredWrites
from deployments.http_server.reader_watch import ReaderWatch
from tests.deployments.support.virtual_time import run

UNREAD_S = 60.0


class Unread:
    """A transport that sends `per_second` bytes each second."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._num_unsent = 0.0
        self._at = asyncio.get_running_loop().time()
        self.aborted_at: float | None = None

    def write(self, data: bytes) -> None:
        self._num_unsent = self.get_write_buffer_size() + len(data)

    def get_write_buffer_size(self) -> int:
        now = asyncio.get_running_loop().time()
        self._num_unsent = max(0.0, self._num_unsent - self._per_second * (now - self._at))
        self._at = now
        return int(self._num_unsent)

    def abort(self) -> None:
        self.aborted_at = asyncio.get_running_loop().time()

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False


def watched(per_second: float, min_bytes_per_s: float = 0.5) -> tuple[Unread, GatheredWrites, ReaderWatch]:
    loop, transport = asyncio.get_running_loop(), Unread(per_second)
    watch: ReaderWatch

    def may_close() -> bool:
        watch.begin()
        return True

    writes = GatheredWrites(cast(asyncio.Transport, transport), loop, may_close)
    watch = ReaderWatch(writes, loop, UNREAD_S, min_bytes_per_s)
    return transport, writes, watch


async def written(writes: GatheredWrites, size: int) -> None:
    writes.write(bytes(size))
    await asyncio.sleep(0)


def test_a_client_that_reads_nothing_for_too_long_is_given_up() -> None:
    async def scenario() -> None:
        transport, writes, watch = watched(0.0)
        await written(writes, 1000)
        watch.begin()
        await asyncio.sleep(UNREAD_S - 1)
        assert transport.aborted_at is None
        await asyncio.sleep(2)
        assert transport.aborted_at == pytest.approx(UNREAD_S)

    run(scenario())


@pytest.mark.parametrize(("per_second", "is_ended"), [(0.4, True), (0.6, False)])
@pytest.mark.parametrize("continues", [True, False], ids=["more is written", "nothing more is written"])
def test_a_client_that_reads_less_than_the_rate_is_given_up(
    per_second: float, is_ended: bool, continues: bool
) -> None:
    """Whatever is written meanwhile, and however little that is, as long as something waits."""

    async def scenario() -> None:
        transport, writes, watch = watched(per_second)
        await written(writes, 200)
        watch.begin()
        for _ in range(5):
            if continues:
                await written(writes, 5)
            await asyncio.sleep(UNREAD_S / 5)
        await asyncio.sleep(1)
        assert (transport.aborted_at is not None) == is_ended

    run(scenario())


def test_with_no_rate_a_byte_is_enough() -> None:
    async def scenario() -> None:
        transport, writes, watch = watched(0.02, min_bytes_per_s=0.0)
        await written(writes, 100)
        watch.begin()
        await asyncio.sleep(10 * UNREAD_S)
        assert transport.aborted_at is None

    run(scenario())


def test_a_client_that_has_nothing_to_read_is_not_given_up() -> None:
    """As between two events of a stream, also where something waits at both looks."""

    async def scenario() -> None:
        transport, writes, watch = watched(1000.0)
        await written(writes, 10)
        watch.begin()
        await asyncio.sleep(1)
        watch.stop()  # as the transport tells that all was read
        await asyncio.sleep(UNREAD_S - 2)
        for _ in range(3):
            await written(writes, 10)
            watch.begin()
            await asyncio.sleep(UNREAD_S)
            watch.stop()
        assert transport.aborted_at is None

    run(scenario())


def test_a_connection_that_is_to_be_closed_is_watched_too() -> None:
    async def scenario() -> None:
        transport, writes, _ = watched(0.0)
        await written(writes, 1000)
        writes.close()
        await asyncio.sleep(UNREAD_S + 1)
        assert transport.aborted_at is not None

    run(scenario())


@pytest.mark.parametrize("continues", [True, False], ids=["more is written", "nothing more is written"])
def test_a_client_that_reads_slowly_is_not_given_up(continues: bool) -> None:
    """What is unread may grow meanwhile."""

    async def scenario() -> None:
        transport, writes, watch = watched(1.0)
        await written(writes, 1000)
        watch.begin()
        for _ in range(90):
            if continues:
                await written(writes, 100)
            await asyncio.sleep(10)
        assert transport.aborted_at is None

    run(scenario())


def test_a_client_that_has_read_everything_is_no_longer_watched() -> None:
    async def scenario() -> None:
        _, writes, watch = watched(1000.0)
        await written(writes, 1000)
        watch.begin()
        await asyncio.sleep(3 * UNREAD_S)
        assert timers() == 0
        watch.begin()
        assert timers() == 0

    run(scenario())


def test_a_connection_that_has_ended_leaves_no_timer() -> None:
    async def scenario() -> None:
        _, writes, watch = watched(0.0)
        await written(writes, 1000)
        watch.begin()
        watch.stop()
        await asyncio.sleep(2 * UNREAD_S)
        assert timers() == 0

    run(scenario())


def timers() -> int:
    loop: Any = asyncio.get_running_loop()
    return sum(not timer.cancelled() for timer in loop._scheduled)
