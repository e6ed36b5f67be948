"""A time limit holds for each wait by itself, and for all of them up to one moment."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.wire.deadlines.deadline import BETWEEN_S
from deployments.wire.deadlines.time_limit import TimeLimit, timeout
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


def test_no_wait_lasts_beyond_the_limit() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        limit = TimeLimit(10.0, total_s=1.5)
        with limit:
            await asyncio.sleep(1)
        with pytest.raises(TimeoutError), limit:
            await asyncio.sleep(1)
        assert loop.time() == pytest.approx(1.5)
        with pytest.raises(TimeoutError), limit:
            await asyncio.sleep(1)
        assert loop.time() == pytest.approx(1.5, abs=2 * BETWEEN_S)

    run(scenario())


def test_a_task_that_is_cancelled_ends_as_cancelled_even_when_its_time_is_over_too() -> None:
    async def scenario() -> None:
        async def wait() -> None:
            with timeout(1.0):
                await asyncio.sleep(60)

        for seconds in (0.5, 1.0):
            task = asyncio.create_task(wait())
            asyncio.get_running_loop().call_later(seconds, task.cancel)
            with pytest.raises(asyncio.CancelledError):
                await task

    run(scenario())


@given(waits=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20), st.integers(1, 20)), max_size=8))
def test_of_many_waits_those_that_take_too_long_are_ended_when_they_do(waits: list[tuple[int, int, int]]) -> None:
    """Each begins at some time, has some seconds, and takes some."""

    async def wait(begins: int, has: int, takes: int) -> None:
        await asyncio.sleep(begins)
        loop, limit = asyncio.get_running_loop(), TimeLimit(has)
        began, is_ended = loop.time(), False
        try:
            with limit:
                await asyncio.sleep(takes - 0.5)
        except TimeoutError:
            is_ended = True
        finally:
            limit.close()
        assert is_ended == (has < takes)
        assert loop.time() - began == pytest.approx(has if is_ended else takes - 0.5)

    async def scenario() -> None:
        await asyncio.gather(*(wait(*each) for each in waits))

    run(scenario())


def test_limits_that_end_in_time_share_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        loop, timers = asyncio.get_running_loop(), 0
        call_at = loop.call_at

        def counted(*args: Any, **kwargs: Any) -> asyncio.TimerHandle:
            nonlocal timers
            timers += 1
            return call_at(*args, **kwargs)

        monkeypatch.setattr(loop, "call_at", counted)
        for _ in range(100):
            limits = [TimeLimit(10), TimeLimit(30), TimeLimit(total_s=600)]
            for limit in limits:
                with limit:
                    pass
                limit.close()
        assert timers == 1

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
