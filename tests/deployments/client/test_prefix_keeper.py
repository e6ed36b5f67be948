"""What a replica alone holds is fetched by others when it is being stopped, and not when it has died."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deployments.client.protocol import GenerateRequest
from deployments.client.remote_engines import RemoteEngines
from deployments.config.kv_fetch import KvFetchSettings
from deployments.wire.messages import Generate
from engine.loading.load_model import load_model
from engine.values.sampling_params import SamplingParams
from router.placer import Placer, PlacerSettings
from tests.deployments.support.in_process_engines import (
    ClientAndEngines,
    InProcessEngines,
    is_nothing_left,
    until,
)
from tests.deployments.support.lossy_link import Noted

SHARED = random.Random(0).choices(range(300), k=96)
BLOCK = 16
SAMPLING = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


class KeepingPlacer(Placer):
    """Places prompts by their cost, and tracks what they share."""

    keep_tokens = 10_000

    def __init__(self, engines: InProcessEngines) -> None:
        settings = PlacerSettings(block_tokens=BLOCK, hot_tokens=10_000, keep_tokens=self.keep_tokens)
        super().__init__(engines.fleet, settings)


class ForgettingPlacer(KeepingPlacer):
    keep_tokens = 0


@asynccontextmanager
async def two_engines(
    placer: type[KeepingPlacer] = KeepingPlacer, **kv_fetch: Any
) -> AsyncIterator[tuple[RemoteEngines, InProcessEngines]]:
    async with ClientAndEngines(
        2,
        placer=placer,
        load=load_model,
        model="demo",
        kv_pages=64,
        page_size=16,
        host_kv_gib=0.02,
        kv_fetch=KvFetchSettings(**{"linger_s": 3600, **kv_fetch}),
    ) as (client, engines):
        await until(lambda: client.num_synced == 2)  # what one leaves behind goes to one that can be reached then
        yield client, engines


async def ask(client: RemoteEngines, name: str, prompt: list[int]) -> tuple[str, int]:
    """Return which replica answered, and how many of the prompt's tokens it had."""
    stream = await client.generate(GenerateRequest(name, "m", prompt, SAMPLING))
    deltas = [delta async for delta in stream]
    return stream.timeline.spans[0].replica, deltas[0].num_cached


async def shared_at_one(client: RemoteEngines) -> tuple[int, int]:
    """Have one replica compute what several prompts share; return its number and the other's."""
    asked = [await ask(client, f"q{number}", [*SHARED, *[number] * 8]) for number in range(3)]
    assert len({replica for replica, _ in asked}) == 1
    holder = int(asked[0][0][1:])
    await until(lambda: len(list(client.placer.only_held_by(f"r{holder}"))) == 1 and client.num_streams == 0)
    return holder, 1 - holder


def num_fetched(engines: InProcessEngines, number: int) -> int:
    return engines.replicas[number].engine.loop.scheduler.load(0.0).peers.loaded


def num_finished(engines: InProcessEngines, number: int) -> int:
    return engines.replicas[number].engine.loop.load().num_finished


@pytest.mark.parametrize("news_first", ["its own", "serve's", "serve's, and its connection has ended"])
def test_a_prefix_that_only_a_stopping_replica_holds_is_fetched_by_one_that_stays(news_first: str) -> None:
    """Serve takes it out of the fleet, and it says itself that it is being stopped: either may come first."""

    async def scenario() -> None:
        async with two_engines() as (client, engines):
            holder, other = await shared_at_one(client)
            if news_first == "its own":
                engines.stopping.add(f"r{holder}")
            else:
                engines.fleet.update({f"r{other}": engines.fleet.addresses()[f"r{other}"]})
            if "connection" in news_first:
                client._connector.sync()
            await until(lambda: num_finished(engines, other) == 1)
            assert num_fetched(engines, other) == (len(SHARED) - 1) // 16  # the last token is always computed
            if news_first == "its own":  # ... and then Serve's
                engines.fleet.update({f"r{other}": engines.fleet.addresses()[f"r{other}"]})
            replica, num_cached = await ask(client, "later", [*SHARED, *[77] * 8])
            assert (replica, num_cached) == (f"r{other}", len(SHARED))
            assert num_finished(engines, other) == 2  # it was fetched once
            await until(lambda: is_nothing_left(client, engines))

    asyncio.run(scenario())


def test_prefixes_that_others_hold_or_that_only_one_prompt_used_are_not_fetched() -> None:
    async def scenario() -> None:
        async with two_engines() as (client, engines):
            holder, other = await shared_at_one(client)
            engines.replicas[holder].engine.loop.empty_cache().result()
            await until(lambda: not list(client.placer.only_held_by(f"r{holder}")))
            await ask(client, "own", list(range(100, 148)))
            engines.stopping.update({"r0", "r1"})
            await until(lambda: client.fleet.count_by_state()["draining"] == 2)
            assert num_fetched(engines, holder) == num_fetched(engines, other) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("why", ["died", "turned off", "last"])
def test_nothing_is_fetched_from_a_replica_that_died_or_without_one_that_stays(why: str) -> None:
    async def scenario() -> None:
        placer = ForgettingPlacer if why == "turned off" else KeepingPlacer
        async with two_engines(placer) as (client, engines):
            if why == "turned off":
                holder = int((await ask(client, "q", SHARED))[0][1:])
                assert (await ask(client, "p", SHARED))[1] > 0
            else:
                holder, _ = await shared_at_one(client)
            kept = Noted(lambda sent: isinstance(sent, Generate) and sent.request_id.startswith("keep-"))
            engines.links[f"r{1 - holder}"].to_replica = kept
            if why == "died":
                client.on_answering(f"r{holder}", False)
            stay = {} if why == "last" else {f"r{1 - holder}": engines.fleet.addresses()[f"r{1 - holder}"]}
            engines.fleet.update(stay)
            await until(lambda: client.num_synced == len(stay))  # its connection has ended
            if why != "last":
                await ask(client, "later", list(range(50)))
                assert num_finished(engines, 1 - holder) == 1
            assert num_fetched(engines, 1 - holder) == 0 and not kept.messages
            await until(lambda: is_nothing_left(client, engines))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "lingers"), [({}, True), ({"linger_s": 0}, False), ({"keep_tokens": 0}, False)]
)
def test_a_stopping_replica_stays_as_long_as_others_may_ask_for_its_prefixes(
    settings: dict[str, Any], lingers: bool
) -> None:
    async def scenario() -> None:
        async with two_engines(**settings) as (_, engines):
            watch = asyncio.create_task(engines.replicas[0].watch(None, "nobody"))
            await asyncio.sleep(0.2)
            assert not watch.done()
            engines.stopping.add("r0")
            if lingers:
                exchange = engines.replicas[0].exchange
                assert exchange is not None
                await until(lambda: exchange._stopping_since is not None)
                await asyncio.sleep(0.3)
                assert not watch.done()
                exchange._stopping_since = -3600.0
            await asyncio.wait_for(watch, 10)

    asyncio.run(scenario())
