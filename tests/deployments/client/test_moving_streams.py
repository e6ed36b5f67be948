"""Streams of a replica that is being stopped go on at another one, which fetches their KV."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

from deployments.client.protocol import GenerateRequest
from deployments.config.kv_fetch import KvFetchSettings
from engine.config import EngineConfig
from engine.engine import LoadedRunner
from engine.loading.load_model import load_model
from engine.sampling_params import SamplingParams
from engine.scheduling.plan import Step, StepPlan, StepResult
from monitoring.metrics import Metrics
from tests.deployments.support.in_process_engines import ClientAndEngines, WeighingPlacer, is_nothing_left, until
from tests.support.metric_values import observations_of

PROMPT = random.Random(0).choices(range(300), k=100)
NUM_TOKENS = 60


class HeldRunner:
    """A runner whose steps wait while `gate` is clear, from the one after `num_free` on."""

    def __init__(self, runner: LoadedRunner) -> None:
        self._runner = runner
        self.gate = threading.Event()
        self.gate.set()
        self.num_free = 10**9

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def prepare(self, plan: StepPlan) -> Step:
        step = self._runner.prepare(plan)

        def run() -> StepResult:
            self.num_free -= 1
            if self.num_free < 0:
                self.gate.wait()
            return step()

        return run


@pytest.mark.parametrize("lends", [True, False])
def test_a_stream_takes_its_kv_along_when_its_replica_is_stopped(lends: bool) -> None:
    held: list[HeldRunner] = []

    def load(config: EngineConfig) -> Any:
        held.append(HeldRunner(load_model(config)))
        return held[-1]

    def asked(name: str) -> GenerateRequest:
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        return GenerateRequest(name, "m", PROMPT, sampling)

    async def scenario() -> None:
        metrics = Metrics("m", "i0", "ingress")
        async with ClientAndEngines(
            2, placer=WeighingPlacer, load=load, model="demo", kv_pages=64, page_size=16, host_kv_gib=0.02,
            kv_fetch=KvFetchSettings() if lends else None, metrics=metrics,
        ) as (client, engines):  # fmt: skip
            expected = [
                token async for delta in await client.generate(asked("whole")) for token in delta.token_ids
            ]
            await engines.empty_caches()
            held[0].gate.clear()
            held[0].num_free = 20
            stream = await client.generate(asked("moves"))
            tokens = []
            async for delta in stream:
                tokens += delta.token_ids
                if len(tokens) > 10:
                    break
            engines.stopping.add("r0")
            if lends:
                await until(lambda: engines.calls[-1] == "r1")
            held[0].gate.set()
            tokens += [token async for delta in stream for token in delta.token_ids]
            assert tokens == expected

            assert engines.calls[-1] == ("r1" if lends else "r0")
            if lends:
                fetched = engines.replicas[1]._loop.load().peers.loaded
                assert fetched >= len(PROMPT) // 16
                moved = observations_of(metrics)[0]["migrations_total"]
                assert moved["drained", "resumed"] == 1
            await until(lambda: is_nothing_left(client, engines))

    asyncio.run(scenario())
