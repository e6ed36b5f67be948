"""A replica whose machine is about to end hands over its streams and prefixes, as far as the time suffices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deployments.client.protocol import GenerateRequest
from deployments.client.remote_engines import RemoteEngines
from deployments.config.kv_fetch import KvFetchSettings
from deployments.config.settings import DrainSettings
from engine.loading.load_model import load_model
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams
from monitoring.metrics import Metrics
from router.placer import Placeable, Placer, PlacerSettings
from tests.deployments.support.held_runner import HeldRunner
from tests.deployments.support.in_process_engines import ClientAndEngines, InProcessEngines, is_nothing_left, until
from tests.support.metric_values import observations_of

BLOCK = 16
TOKENS = random.Random(0).choices(range(300), k=400)


class NotingPlacer(Placer):
    """Places requests by their cost, one transfer at a time, and notes the order."""

    def __init__(self, engines: InProcessEngines) -> None:
        settings = PlacerSettings(block_tokens=BLOCK, hot_tokens=10_000, keep_tokens=10_000, keep_at_once=1)
        super().__init__(engines.fleet, settings)
        self.placed: list[tuple[str, str]] = []

    def order(self, request: Placeable, candidates: Collection[str], avoid: Collection[str] = ()) -> Sequence[str]:
        order = super().order(request, candidates, avoid)
        self.placed.append((request.request_id.partition("~")[0], order[0]))
        return order


@dataclass
class Scene:
    """Two replicas and a client. A file named like a replica is its notice."""

    client: RemoteEngines
    engines: InProcessEngines
    runners: list[HeldRunner]
    notices: Path
    metrics: Metrics
    open: list[Any] = field(default_factory=list)

    @property
    def placed(self) -> list[tuple[str, str]]:
        placer = self.client.placer
        assert isinstance(placer, NotingPlacer)
        return placer.placed

    async def ask(self, name: str, prompt: list[int], max_tokens: int = 2) -> Any:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return await self.client.generate(GenerateRequest(name, "m", prompt, sampling))

    async def answer(self, name: str, prompt: list[int], max_tokens: int = 2) -> tuple[str, list[int], int]:
        """Return which replica answered, what, and how many of the prompt's tokens it had."""
        stream = await self.ask(name, prompt, max_tokens)
        deltas = [delta async for delta in stream]
        tokens = [token for delta in deltas for token in delta.token_ids]
        return stream.timeline.spans[0].replica, tokens, deltas[0].num_cached

    async def begun(self, name: str, prompt: list[int], max_tokens: int = 60) -> tuple[Any, list[int]]:
        """Return a stream after some of its tokens, and these."""
        stream, tokens = await self.ask(name, prompt, max_tokens), []
        async for delta in stream:
            tokens += delta.token_ids
            if len(tokens) > 10:
                return stream, tokens
        raise AssertionError("it ended early")

    def handed_over(self) -> dict[str, float]:
        counts = observations_of(self.metrics)[0].get("handed_over_tokens_total", {})
        return {kind: count for (kind,), count in counts.items()}

    def num_fetched(self, number: int) -> int:
        return self.engines.replicas[number].engine.loop.scheduler.load(0.0).peers.loaded


@asynccontextmanager
async def scene(notices: Path, grace_s: float = 60.0) -> AsyncIterator[Scene]:
    runners: list[HeldRunner] = []

    def load(config: EngineConfig) -> Any:
        runners.append(HeldRunner(load_model(config)))
        return runners[-1]

    def drain(replica: str) -> DrainSettings:
        return DrainSettings(notice=str(notices / replica), grace_s=grace_s, poll_s=0.1)

    metrics = Metrics("m", "i0", "ingress")
    async with ClientAndEngines(
        2, placer=NotingPlacer, load=load, model="demo", kv_pages=128, page_size=BLOCK, host_kv_gib=0.02,
        kv_fetch=KvFetchSettings(), metrics=metrics, drain=drain,
    ) as (client, engines):  # fmt: skip
        await until(lambda: client.num_synced == 2)
        try:
            yield Scene(client, engines, runners, notices, metrics)
        finally:
            for runner in runners:
                runner.gate.set()


async def is_leaving(here: Scene, replica: str) -> bool:
    (found,) = [one for one in (await here.client.health()).replicas if one.replica == replica]
    return found.is_draining


def test_after_a_notice_streams_and_prefixes_are_elsewhere_and_so_are_new_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(tmp_path) as here:
            shared = TOKENS[:96]
            asked = [await here.answer(f"q{number}", [*shared, *[number] * 8]) for number in range(3)]
            (holder,) = {replica for replica, _, _ in asked}
            number, other = int(holder[1:]), f"r{1 - int(holder[1:])}"
            prompt = [*shared, *TOKENS[100:170]]
            expected = (await here.answer("whole", prompt, 60))[1]
            await until(lambda: len(list(here.client.placer.only_held_by(holder))) >= 1)
            here.runners[number].gate.clear()
            here.runners[number].num_free = 20
            stream, tokens = await here.begun("moves", prompt)
            assert stream.replica == holder

            (tmp_path / holder).touch()
            await until(lambda: here.placed[-1][1] == other)
            assert await is_leaving(here, holder) and not await is_leaving(here, other)
            here.runners[number].gate.set()
            tokens += [token async for delta in stream for token in delta.token_ids]
            assert tokens == expected
            await until(lambda: here.handed_over().get("stream", 0.0) >= len(prompt) // BLOCK * BLOCK)
            assert here.num_fetched(1 - number) >= len(prompt) // BLOCK

            replica, _, num_cached = await here.answer("later", [*shared, *[77] * 8])
            assert (replica, num_cached) == (other, len(shared))
            leaving = here.engines.replicas[number]
            assert leaving.notices.counts == {"file": 1} and 0 < (leaving.notices.seconds_left or 0) <= 60
            await until(lambda: is_nothing_left(here.client, here.engines))

    asyncio.run(scenario())


def test_a_prefix_that_only_the_replica_holds_counts_as_handed_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(tmp_path) as here:
            shared = TOKENS[:96]
            asked = [await here.answer(f"q{number}", [*shared, *[number] * 8]) for number in range(3)]
            holder = asked[0][0]
            await until(
                lambda: len(list(here.client.placer.only_held_by(holder))) == 1 and not here.client.num_streams
            )
            (tmp_path / holder).touch()
            await until(lambda: bool(here.handed_over().get("prefix")))
            # The last token of the request for it is always computed.
            assert here.handed_over() == {"stream": 0.0, "prefix": (len(shared) - 1) // BLOCK * BLOCK}

    asyncio.run(scenario())


def test_the_most_valuable_is_handed_over_first_and_one_after_the_other(tmp_path: Path) -> None:
    """A longer stream saves more tokens per second."""

    async def scenario() -> None:
        async with scene(tmp_path) as here:
            (tmp_path / "r1").touch()
            await until(lambda: here.client.fleet.count_by_state()["draining"] == 1)
            shared = TOKENS[300:332]
            for number in range(2):
                await here.answer(f"q{number}", [*shared, *[number] * 20])
            prompts = {"short": TOKENS[:40], "long": TOKENS[40:250], "middle": TOKENS[250:350]}
            here.runners[0].step_s = 0.01
            begun = {name: await here.begun(name, prompt, 400) for name, prompt in prompts.items()}
            here.placed.clear()
            (tmp_path / "r1").unlink()
            await until(lambda: here.client.fleet.count_by_state()["draining"] == 0)
            (tmp_path / "r0").touch()
            await until(lambda: len(here.placed) >= 4)
            names = [name for name, _ in here.placed if not name.startswith("keep-")]
            assert names == ["long", "middle", "short"] and len(here.placed) == 4
            assert {replica for _, replica in here.placed} == {"r1"}
            for name, (stream, tokens) in begun.items():
                tokens += [token async for delta in stream for token in delta.token_ids]
                assert tokens == (await here.answer(f"{name}?", prompts[name], 400))[1]

    asyncio.run(scenario())


def test_a_stream_whose_transfer_would_not_end_in_time_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(tmp_path, grace_s=0.05) as here:
            (tmp_path / "r1").touch()
            await until(lambda: here.client.fleet.count_by_state()["draining"] == 1)
            expected = (await here.answer("whole", TOKENS[:100], 60))[1]
            here.runners[0].gate.clear()
            here.runners[0].num_free = 20
            stream, tokens = await here.begun("stays", TOKENS[:100])
            (tmp_path / "r1").unlink()
            await until(lambda: here.client.fleet.count_by_state()["draining"] == 0)
            (tmp_path / "r0").touch()
            await until(lambda: here.client.fleet.count_by_state()["draining"] == 1)
            await asyncio.sleep(0.3)
            here.runners[0].gate.set()
            tokens += [token async for delta in stream for token in delta.token_ids]
            assert tokens == expected and stream.replica == "r0" and not stream.timeline.migrations

    asyncio.run(scenario())


@pytest.mark.parametrize("replica", ["r0", "r1"])
def test_a_replica_whose_notice_is_withdrawn_serves_again(tmp_path: Path, replica: str) -> None:
    async def scenario() -> None:
        async with scene(tmp_path) as here:
            other = "r1" if replica == "r0" else "r0"
            for _ in range(2):
                (tmp_path / replica).touch()
                await until(lambda: here.client.fleet.count_by_state()["draining"] == 1)
                assert (await here.answer("away", TOKENS[:64]))[0] == other
                (tmp_path / replica).unlink()
                await until(lambda: here.client.fleet.count_by_state()["draining"] == 0)
            (tmp_path / other).touch()
            await until(lambda: here.client.fleet.count_by_state()["draining"] == 1)
            assert (await here.answer("back", TOKENS[64:128]))[0] == replica

    asyncio.run(scenario())
