"""Streams of a replica that is being stopped go on at another one, which fetches their KV."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from deployments.client.protocol import GenerateRequest
from deployments.config.kv_fetch import KvFetchSettings
from engine.loading.load_model import load_model
from engine.settings.config import EngineConfig
from engine.values.beam_search import BeamParams
from engine.values.sampling_params import SamplingParams
from monitoring.metrics import Metrics
from router.placer import Placer, PlacerSettings
from tests.deployments.support.held_runner import HeldRunner
from tests.deployments.support.in_process_engines import (
    ClientAndEngines,
    InProcessEngines,
    WeighingPlacer,
    is_nothing_left,
    until,
)
from tests.support.metric_values import observations_of

PROMPT = random.Random(0).choices(range(300), k=100)
NUM_TOKENS = 60


class RolePlacer(Placer):
    """Places prompts by their cost, where replicas have roles."""

    def __init__(self, engines: InProcessEngines) -> None:
        super().__init__(engines.fleet, PlacerSettings(apart_above_tokens=64))


def moved_streams(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Count streams that have moved, by reason and outcome."""
    return {labels: count for labels, count in observations_of(metrics)[0]["migrations_total"].items() if count}


def num_fetched(engines: InProcessEngines) -> list[int]:
    """Return the pages that each replica has fetched."""
    return [replica.engine.loop.scheduler.load(0.0).peers.loaded for replica in engines.replicas]


async def tokens_of(stream: Any) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


def test_the_replica_that_computed_a_long_prompt_hands_its_stream_over() -> None:
    """The first token comes from there, and the rest from one that generates, which fetches the KV."""

    async def scenario() -> None:
        metrics = Metrics("m", "i0", "ingress")
        async with ClientAndEngines(
            3, placer=RolePlacer, load=load_model, model="demo", kv_pages=64, page_size=16, host_kv_gib=0.02,
            kv_fetch=KvFetchSettings(), roles=("prefill", "decode", "decode"), metrics=metrics,
        ) as (client, engines):  # fmt: skip
            sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
            short = GenerateRequest("short", "m", list(range(50)), sampling)
            assert len(await tokens_of(await client.generate(short))) == NUM_TOKENS
            num_finished = [replica.engine.loop.scheduler.load(0.0).num_finished for replica in engines.replicas]
            assert num_finished[0] == 0 and sum(num_finished) == 1

            stream = await client.generate(GenerateRequest("long", "m", PROMPT, sampling))
            tokens = await tokens_of(stream)
            await until(lambda: sum(num_fetched(engines)) >= len(PROMPT) // 16)  # in time for the stream, or late
            assert num_fetched(engines)[0] == 0
            assert [span.replica for span in stream.timeline.spans] in (["r0", "r1"], ["r0", "r2"])
            assert moved_streams(metrics) == {("handed_over", "resumed"): 1}
            assert not stream.timeline.migrations

            for name, one in (("one", {"max_tokens": 1}), ("beams", {"beams": BeamParams(2), "max_tokens": 4})):
                asked = GenerateRequest(name, "m", PROMPT[::-1], replace(sampling, **one))
                await tokens_of(await client.generate(asked))
            assert moved_streams(metrics) == {("handed_over", "resumed"): 1}

            for replica in engines.replicas[1:]:
                engines.stopping.add(replica.replica)
            await until(lambda: client.fleet.count_by_state()["draining"] == 2)
            alone = await tokens_of(await client.generate(GenerateRequest("alone", "m", PROMPT, sampling)))
            assert alone == tokens
            await until(lambda: is_nothing_left(client, engines))

    asyncio.run(scenario())


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
                await until(lambda: num_fetched(engines)[1] >= len(PROMPT) // 16)
                assert moved_streams(metrics) == {("drained", "resumed"): 1}
            await until(lambda: is_nothing_left(client, engines))

    asyncio.run(scenario())
