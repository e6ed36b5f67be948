"""Real engines behind a real wire fetch prefixes from each other, and answer as if they had computed them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from deployments.client.protocol import GenerateRequest
from deployments.client.remote_engines import RemoteEngines
from deployments.config.kv_fetch import KvFetchSettings
from engine.loading.load_model import load_model
from engine.values.sampling_params import SamplingParams
from tests.deployments.support.in_process_engines import ClientAndEngines, InProcessEngines, WeighingPlacer, until

PROMPT = random.Random(0).choices(range(300), k=330)
WHOLE = 320
"""Tokens of the prompt's whole pages."""


class Service:
    """Two replicas with host memory, and a client that chooses between them."""

    def __init__(self, client: RemoteEngines, engines: InProcessEngines) -> None:
        self.client, self.engines, self._number = client, engines, 0

    async def ask(self, at: int, prompt: list[int] = PROMPT, salt: str = "") -> tuple[list[int], int]:
        """Return the answer of a replica, and how much of the prompt it had."""
        self._number += 1
        self.engines.choose = lambda names: f"r{at}"
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        stream = await self.client.generate(GenerateRequest(f"q{self._number}", "m", prompt, sampling, salt=salt))
        tokens, cached = [], 0
        async for delta in stream:
            tokens += delta.token_ids
            cached = delta.num_cached
        return tokens, cached

    async def ask_first(self, at: int, salt: str = "") -> list[int]:
        """Ask a replica, and wait until the router knows that it has the prompt."""
        tokens, cached = await self.ask(at, salt=salt)
        assert cached == 0
        replica = self.engines.replicas[at]
        await until(lambda: self.client.placer.totals()["blocks"] >= WHOLE // 16)
        assert replica.exchange is not None
        return tokens

    def num_sent(self, at: int) -> int:
        exchange = self.engines.replicas[at].exchange
        assert exchange is not None
        return exchange.sender.counts["pages"]


@asynccontextmanager
async def serving(**settings: float | str) -> AsyncIterator[Service]:
    """Two engines, which fetch from each other. Silence is noticed by the tests that ask for it alone."""
    shared = {"expected_mib_per_s": 100_000.0, "silence_s": 60.0}
    options = KvFetchSettings.model_validate(shared | settings)
    async with ClientAndEngines(
        2, placer=WeighingPlacer, load=load_model, model="demo", kv_pages=256, page_size=16, host_kv_gib=0.02,
        kv_fetch=options,
    ) as (client, engines):  # fmt: skip
        yield Service(client, engines)


@pytest.mark.parametrize("transport", ["zmq", "nixl"])
def test_a_prefix_is_fetched_and_the_answer_is_the_same(transport: str) -> None:
    async def ask() -> None:
        async with serving(transport=transport) as service:
            expected = await service.ask_first(0)
            assert await service.ask(1) == (expected, WHOLE)
            assert (service.num_sent(0), service.num_sent(1)) == (WHOLE // 16, 0)
            decision = service.client.placer.decisions(1)[0]
            assert (decision.fetch_from, decision.fetch_tokens, decision.actual_cached) == ("r0", WHOLE, WHOLE)
            assert await service.ask(1) == (expected, len(PROMPT) - 1)  # from its own memory
            assert service.num_sent(0) == WHOLE // 16

    asyncio.run(ask())


def test_pages_computed_under_one_salt_are_fetched_for_no_other() -> None:
    async def ask() -> None:
        async with serving() as service:
            expected = await service.ask_first(0, salt="acme")
            assert await service.ask(1, salt="acme") == (expected, WHOLE)
            assert await service.ask(1, salt="other") == (expected, 0)
            assert service.num_sent(0) == WHOLE // 16

    asyncio.run(ask())


def test_a_source_that_is_gone_or_has_forgotten_costs_nothing_but_computing() -> None:
    async def ask() -> None:
        async with serving(silence_s=0.3) as service:
            expected = await service.ask_first(0)
            source = service.engines.replicas[0]
            other = [token + 1 for token in PROMPT]
            await source.empty_cache()
            assert await service.ask(1) == (expected, 0)  # before the router hears of it, or after
            second = await service.ask(0, other)
            source.close()
            assert (await service.ask(1, other))[0] == second[0]

    asyncio.run(ask())
