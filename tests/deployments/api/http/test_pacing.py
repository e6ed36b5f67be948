"""An ingress's streams share the chunks it may write; deltas that come meanwhile are merged, none is lost."""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise

import pytest

from deployments.api.http.pacing import Pace, Turns, chunks_per_s
from tests.deployments.support.virtual_time import now, run


async def _write(turns: Turns, every_s: float, until: float) -> list[float]:
    """Return the times at which a stream writes that gets a token every `every_s` seconds."""
    written = []
    while now() < until:
        written.append(now())
        await turns.wait()
        # Until the next token, where one did not come meanwhile.
        await asyncio.sleep((math.floor(now() / every_s + 1e-6) + 1) * every_s - now())
    return written


def test_streams_share_the_writes_that_an_ingress_may_make() -> None:
    async def scenario() -> list[list[float]]:
        pace = Pace(max_per_s=1000)
        streams = [_write(pace.open(), every_s=0.001, until=2.0) for _ in range(100)]
        return list(await asyncio.gather(*streams))

    written = run(scenario())
    assert 1900 < sum(len(times) for times in written) <= 2300
    assert all(19 <= len(times) <= 24 for times in written)
    assert all(times[0] == 0.0 for times in written)
    assert all(after - before < 0.11 for times in written for before, after in pairwise(times))


def test_slow_streams_do_not_wait_next_to_fast_ones() -> None:
    async def scenario() -> list[float]:
        pace = Pace(max_per_s=1000)
        fast = [asyncio.create_task(_write(pace.open(), every_s=0.001, until=2.0)) for _ in range(49)]
        slow = await _write(pace.open(), every_s=0.1, until=2.0)
        await asyncio.gather(*fast)
        return slow

    assert len(run(scenario())) in (20, 21)


def test_a_fast_stream_may_use_the_rate_that_others_leave() -> None:
    async def scenario() -> list[float]:
        pace = Pace(max_per_s=1000)
        others = [pace.open() for _ in range(500)]
        written = await _write(pace.open(), every_s=0.002, until=2.0)
        assert len(others) == 500
        return written

    assert len(run(scenario())) in (1000, 1001)


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


def test_few_cores_write_fewer_chunks_unless_the_number_is_set() -> None:
    cores = (1, 2, 4, 8, 64)
    assert [chunks_per_s("auto", count, has_proxy=False) for count in cores] == [1000, 2000, 4000, 8000, 8000]
    assert [chunks_per_s("auto", count, has_proxy=True) for count in cores] == [250, 500, 1000, 2000, 2000]
    assert [chunks_per_s(setting, 2, has_proxy=True) for setting in (30.0, None)] == [30, None]
