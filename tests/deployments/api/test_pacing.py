"""An ingress's streams share the chunks it may write; what comes meanwhile is merged, and nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from deployments.api.pacing import Pace, Turns
from tests.deployments.virtual_time import now, run


async def _write(turns: Turns, every_s: float, until: float) -> list[float]:
    """When a stream writes whose tokens come every so often."""
    written = []
    while now() < until:
        written.append(now())
        await turns.wait()
        await asyncio.sleep(every_s - now() % every_s)
    return written


def test_streams_share_what_an_ingress_may_write() -> None:
    async def scenario() -> list[list[float]]:
        pace = Pace(max_per_s=1000)
        streams = [_write(pace.open(), every_s=0.001, until=2.0) for _ in range(100)]
        return list(await asyncio.gather(*streams))

    written = run(scenario())
    assert 1900 < sum(len(times) for times in written) <= 2200
    assert all(19 <= len(times) <= 22 for times in written)
    # The first token and the one after it go out at once; then each stream has its share.
    assert all(times[1] < 0.01 < 0.09 < times[2] for times in written)


def test_slow_tokens_wait_for_nothing() -> None:
    async def scenario() -> list[float]:
        pace = Pace(max_per_s=1000)
        turns, others = pace.open(), [pace.open() for _ in range(49)]
        written = await _write(turns, every_s=0.05, until=1.0)
        assert len(others) == 49
        return written

    assert len(run(scenario())) == 20


def test_a_stream_that_has_ended_leaves_its_share_to_the_others() -> None:
    pace = Pace(max_per_s=1000)
    turns = [pace.open() for _ in range(10)]
    assert pace.seconds == pytest.approx(0.01)
    for one in turns[:5]:
        one.close()
        one.close()
    assert pace.seconds == pytest.approx(0.005)


def test_without_a_limit_nothing_waits() -> None:
    async def scenario() -> float:
        pace = Pace(None)
        turns = [pace.open() for _ in range(1000)]
        for one in turns * 10:
            await one.wait()
        return now()

    assert run(scenario()) == 0.0
