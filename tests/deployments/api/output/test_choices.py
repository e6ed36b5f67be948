"""The generations of one request begin over several turns of the event loop, so that other streams go on."""

from __future__ import annotations

import asyncio
from typing import Any

from deployments.api.output.choices import Choices
from deployments.client.outgoing import TURN_TOKENS
from deployments.client.protocol import GenerateRequest, Overloaded
from engine.values.sampling_params import SamplingParams


class Engines:
    """Notes in which turn of the loop each generation begins, and what it has to send."""

    def __init__(self, refuses: int | None = None) -> None:
        self.turn = self.num_closed = 0
        self.begun: list[tuple[int, int]] = []
        self._refuses = refuses

    async def count_turns(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turn += 1

    async def generate(self, request: GenerateRequest) -> Any:
        self.begun.append((self.turn, len(request.prompt_ids)))
        if len(self.begun) - 1 == self._refuses:
            raise Overloaded("full", 1.0)
        return self

    async def aclose(self) -> None:
        self.num_closed += 1


def opened(engines: Engines, num_requests: int, num_tokens: int) -> None:
    async def main() -> None:
        counting = asyncio.create_task(engines.count_turns())
        ids = [5] * num_tokens
        requests = [GenerateRequest(f"r-{n}", "m", ids, SamplingParams()) for n in range(num_requests)]
        parts: list[tuple[GenerateRequest, list[Any]]] = [(request, []) for request in requests]
        choices = Choices(engines, parts, 60.0)  # type: ignore[arg-type]
        try:
            await choices.open()
        finally:
            await choices.aclose()
            counting.cancel()

    asyncio.run(main())


def test_no_turn_sends_more_than_so_many_tokens() -> None:
    engines = Engines()
    opened(engines, 62, 65_000)
    turns: dict[int, int] = {}
    for turn, size in engines.begun:
        turns[turn] = turns.get(turn, 0) + size
    assert len(engines.begun) == 62 and max(turns.values()) <= TURN_TOKENS


def test_many_short_ones_take_several_turns_too() -> None:
    engines = Engines()
    opened(engines, 1024, 2)
    turns = [turn for turn, _ in engines.begun]
    assert len(turns) == 1024 and max(map(turns.count, set(turns))) <= 32


def test_when_one_is_refused_while_others_begin_all_are_closed() -> None:
    engines = Engines(refuses=3)
    try:
        opened(engines, 100, 65_000)
    except Overloaded:
        pass
    else:
        raise AssertionError("the refusal was lost")
    assert engines.num_closed == 99
