"""Many long streams that lose their replicas at once go on, and the event loop has its turns between them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from deployments.client.outgoing import TURN_TOKENS, sending_cost
from deployments.client.stream import Stream
from deployments.wire.messages import CLEARED_TOKENS
from tests.deployments.support.in_process_engines import ClientAndEngines, request, until
from tests.deployments.support.time_limit import run_scenario
from tests.deployments.support.told_deaths import Deaths

PROMPT_TOKENS = 3600
COUNT = 60
NUM_TOKENS = 300


def test_streams_that_resume_together_are_sent_over_many_turns() -> None:
    """Two of three replicas die, and all streams have tokens enough to go on beside each other at once."""

    async def scenario() -> None:
        turn, sent = 0, Counter[int]()

        def next_turn() -> None:
            nonlocal turn
            turn += 1
            asyncio.get_running_loop().call_soon(next_turn)

        def choose(names: Sequence[str]) -> str:
            sent[turn] += sending_cost(PROMPT_TOKENS)
            return names[-1]

        config: dict[str, Any] = {
            "page_size": 16,
            "max_running": COUNT,
            "max_waiting": COUNT,
            "max_step_tokens": 2**20,
        }
        deaths, kv_pages = Deaths(), 2 * COUNT * PROMPT_TOKENS // 16
        async with ClientAndEngines(3, watcher=deaths, kv_pages=kv_pages, **config) as (client, engines):
            await until(lambda: len(client.reachable()) == 3)
            engines.choose = lambda names: names[len(engines.calls) % 2]
            for runner in engines.runners:
                runner.step_s = 0.01
            prompts = [[number] * PROMPT_TOKENS for number in range(COUNT)]
            asked = [structs.replace(request(f"s{p[0]}", max_tokens=NUM_TOKENS), prompt_ids=p) for p in prompts]
            streams = [await client.generate(one) for one in asked]
            await until(lambda: all(stream.journal.num_tokens > CLEARED_TOKENS for stream in streams))
            engines.choose = choose
            next_turn()
            for number in range(2):
                engines.fall_silent(number)
                deaths.tell(f"r{number}")
            engines.runners[2].step_s = 0.0
            assert [await _tokens(stream) for stream in streams] == [list(range(1, NUM_TOKENS + 1))] * COUNT
            assert max(sent.values()) <= TURN_TOKENS + sending_cost(PROMPT_TOKENS)

    run_scenario(scenario())


async def _tokens(stream: Stream) -> list[int]:
    async for _ in stream:
        pass
    return stream.journal.token_ids
