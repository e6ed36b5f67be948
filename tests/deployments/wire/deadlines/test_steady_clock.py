"""A clock that is asked seldom counts all time, but that in which its event loop stood still."""

from __future__ import annotations

import asyncio

import pytest

from deployments.wire.deadlines.steady_clock import SteadyClock
from engine.base.awake_clock import LOOK_S, STILL_S
from tests.deployments.support.virtual_time import run


def test_seconds_between_two_questions_count_and_a_pause_does_not() -> None:
    async def scenario() -> None:
        loop, paused_s = asyncio.get_running_loop(), 0.0
        clock = SteadyClock(lambda: loop.time() + paused_s)
        began = clock.now()
        assert began == clock.born
        await asyncio.sleep(60)
        assert clock.now() - began == pytest.approx(60)
        paused_s = 3600.0
        await asyncio.sleep(60)
        assert clock.now() - began == pytest.approx(120 + STILL_S, abs=2 * LOOK_S)

    run(scenario())
