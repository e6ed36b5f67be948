"""A time limit holds for each wait by itself, and for all of them up to one moment."""

from __future__ import annotations

import asyncio
import weakref

import pytest

from deployments.api.time_limit import TimeLimit
from tests.deployments.support.virtual_time import run


def test_only_a_wait_that_takes_too_long_is_ended() -> None:
    async def scenario() -> None:
        loop, limit = asyncio.get_running_loop(), TimeLimit(1.0)
        for _ in range(5):
            with limit:
                await asyncio.sleep(0.6)
            await asyncio.sleep(5)  # between two waits no time counts
        began = loop.time()
        with pytest.raises(TimeoutError), limit:
            await asyncio.sleep(60)
        assert loop.time() - began == pytest.approx(1.0)
        with limit:  # and the next wait has its whole time
            await asyncio.sleep(0.9)
        limit.close()

    run(scenario())


def test_no_wait_goes_on_beyond_the_moment() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        limit = TimeLimit(10.0, at=loop.time() + 1.5)
        with limit:
            await asyncio.sleep(1)
        with pytest.raises(TimeoutError), limit:
            await asyncio.sleep(1)
        assert loop.time() == pytest.approx(1.5)
        with pytest.raises(TimeoutError), limit:
            await asyncio.sleep(1)
        assert loop.time() == pytest.approx(1.5)

    run(scenario())


def test_a_task_that_is_cancelled_ends_as_cancelled_even_when_its_time_is_over_too() -> None:
    async def scenario() -> None:
        async def wait() -> None:
            with TimeLimit(1.0):
                await asyncio.sleep(60)

        for seconds in (0.5, 1.0):
            task = asyncio.create_task(wait())
            asyncio.get_running_loop().call_later(seconds, task.cancel)
            with pytest.raises(asyncio.CancelledError):
                await task

    run(scenario())


def test_the_event_loop_keeps_nothing_of_a_closed_limit() -> None:
    async def scenario() -> None:
        limit = TimeLimit(600.0)
        with limit:
            await asyncio.sleep(0)
        kept = weakref.ref(limit)
        limit.close()
        del limit
        assert kept() is None

    run(scenario())
