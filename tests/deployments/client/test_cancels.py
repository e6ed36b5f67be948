"""A request that is cancelled at any turn of the event loop leaves nothing behind at its engines or on the way."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from deployments.api import TextCodec
from tests.deployments.support.in_process_engines import ClientAndEngines, is_nothing_left, until
from tests.deployments.support.turns import TurnLoop, turns
from tests.deployments.support.watched_api import WAIT, WatchedApi, WatchedClient

BODY = {"prompt": list(range(100, 120)), "max_tokens": 4}
MIN_TURNS = 12
"""Turns to interfere at in any case: engines that answer in few pieces end some requests before."""


@pytest.mark.parametrize("waits", [False, True], ids=["at-once", "waits"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_request_cancelled_at_any_turn_leaves_nothing_at_its_engines(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, stream: bool, n: int, waits: bool
) -> None:
    async def scenario() -> None:
        async with ClientAndEngines(2, kv_pages=400) as (client, engines):
            await until(lambda: len(client.reachable()) == 2)
            placed = iter(range(100_000))
            engines.choose = lambda names: names[next(placed) % len(names)]
            api = WatchedApi(codec, monkeypatch, client)
            turn, has_ended = 0, False
            while not has_ended or turn < MIN_TURNS:
                turn += 1
                api.load.num_checks = WAIT if waits else 0
                tasks = asyncio.all_tasks()
                user = WatchedClient(api.app, "/v1/completions", {**BODY, "stream": stream, "n": n}, "server")
                turns().at_turn(turns().num_turns + turn, user.leave)
                await asyncio.wait([user.task])
                has_ended = not user.has_left.is_set()
                await until(lambda: is_nothing_left(client, engines))
                await until(partial(_are_over, tasks))
                assert not api.left(), f"cancelled at turn {turn}"
            assert sum(map(_num_finished, engines.replicas)) >= n

    with asyncio.Runner(loop_factory=TurnLoop) as runner:
        runner.run(asyncio.wait_for(scenario(), 300))


def _are_over(tasks: set[asyncio.Task[object]]) -> bool:
    """Whether all tasks have ended but these, which there were before."""
    return asyncio.all_tasks() <= tasks


def _num_finished(replica: object) -> int:
    return int(replica.engine.loop.load().num_finished)  # type: ignore[attr-defined]
