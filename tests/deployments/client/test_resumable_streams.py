"""Streams that continue at another ingress, or after their client has come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
from msgspec import structs

from deployments.client.protocol import FoundPart, FoundStream, GenerateRequest, TakenOver
from deployments.client.remote_engines import RemoteEngines
from deployments.config.settings import StreamSettings
from deployments.wire.messages import ResumableStream
from engine.values.stream_delta import StreamDelta
from tests.deployments.support.in_process_engines import (
    ClientAndEngines,
    another,
    is_nothing_left,
    request,
    until,
)

NUM_TOKENS = 12
Scenario = Callable[..., Coroutine[Any, Any, None]]


def scenario(test: Scenario) -> Callable[..., None]:
    """Run a test on an event loop of its own."""

    @wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(test(**given))

    return run


ALL = list(range(1, NUM_TOKENS + 1))


def resumable(name: str = "s", index: int = 0, **fields: Any) -> GenerateRequest:
    """A request of a resumable stream."""
    stream = ResumableStream(name, index, "tenant", b"the client's request")
    return structs.replace(request(f"{name}-{index}", NUM_TOKENS), stream=structs.replace(stream, **fields))


async def rest(stream: Any) -> StreamDelta:
    """Read a stream to its end."""
    whole = StreamDelta("")
    async for delta in stream:
        whole.add(delta)
    return whole


async def read(stream: Any, num_tokens: int) -> list[int]:
    """Read the first tokens."""
    found: list[int] = []
    while len(found) < num_tokens:
        found += (await anext(stream)).token_ids
    return found


async def found(client: RemoteEngines, name: str = "s") -> FoundStream:
    stream = await client.find(name, "tenant")
    assert stream is not None
    return stream


async def part(client: RemoteEngines, index: int = 0) -> FoundPart:
    return (await found(client)).parts[index]


@pytest.mark.parametrize("reader", ["reads", "has left", "is gone"])
@scenario
async def test_another_ingress_continues_a_stream(reader: str) -> None:
    async with ClientAndEngines() as (other, engines), AsyncExitStack() as first:
        client = await first.enter_async_context(another(engines))
        engines.runners[0].free_tokens = 5
        engines.runners[0].gate.clear()
        stream = await client.generate(resumable())
        assert await read(stream, 5) == ALL[:5]
        if reader == "has left":
            await stream.detach()
        elif reader == "is gone":
            await first.aclose()
        stored = await found(other)
        assert stored.record == b"the client's request"
        continued = await other.adopt(resumable(), stored.parts[0])
        assert await read(continued, 5) == ALL[:5]
        engines.runners[0].gate.set()
        whole = await rest(continued)
        assert (whole.token_ids, whole.finish_reason) == (ALL[5:], "length")
        if reader == "reads":
            with pytest.raises(TakenOver):
                await rest(stream)
        await until(lambda: is_nothing_left(other, engines) and client.num_streams == 0)


@scenario
async def test_a_second_reader_at_the_same_ingress_ends_the_first() -> None:
    async with ClientAndEngines() as (client, engines):
        engines.runners[0].gate.clear()
        engines.runners[0].free_tokens = 3
        stream = await client.generate(resumable())
        await read(stream, 3)
        again = await client.adopt(resumable(), await part(client))
        with pytest.raises(TakenOver):
            await rest(stream)
        engines.runners[0].gate.set()
        assert (await rest(again)).token_ids == ALL
        await until(lambda: is_nothing_left(client, engines))


@scenario
async def test_a_stream_that_has_ended_is_read_again() -> None:
    async with ClientAndEngines() as (client, engines), another(engines) as other:
        assert (await rest(await client.generate(resumable()))).token_ids == ALL
        ended = await part(other)
        assert (ended.part.num_tokens, ended.part.finish_reason) == (NUM_TOKENS, "length")
        again = await rest(await other.adopt(resumable(), ended))
        assert (again.token_ids, again.finish_reason) == (ALL, "length")


@scenario
async def test_a_stream_that_has_moved_is_continued_with_the_tokens_of_its_first_replica() -> None:
    async with ClientAndEngines(2) as (other, engines), another(engines) as client:
        for runner in engines.runners:
            runner.gate.clear()
            runner.free_tokens = 4
        stream = await client.generate(resumable())
        await read(stream, 4)
        first = await part(other)
        for runner in engines.runners:
            runner.free_tokens = 8
        client._dispatch.lose(first.replica, "failed", "the test says so")
        await read(stream, 4)
        moved = await part(other)
        assert (moved.replica != first.replica, moved.part.num_tokens) == (True, 8)
        continued = await other.adopt(resumable(), moved)
        assert await read(continued, 8) == ALL[:8]
        for runner in engines.runners:
            runner.gate.set()
        assert (await rest(continued)).token_ids == ALL[8:]


@scenario
async def test_a_continued_stream_survives_the_loss_of_its_replica() -> None:
    async with ClientAndEngines(2) as (other, engines):
        for runner in engines.runners:
            runner.gate.clear()
            runner.free_tokens = 4
        async with another(engines) as client:
            await read(await client.generate(resumable()), 4)
        known = await part(other)
        continued = await other.adopt(resumable(), known)
        await read(continued, 4)
        other._dispatch.lose(known.replica, "failed", "the test says so")
        for runner in engines.runners:
            runner.gate.set()
        assert (await rest(continued)).token_ids == ALL[4:]


@scenario
async def test_a_stream_whose_replica_was_lost_meanwhile_is_generated_again() -> None:
    async with ClientAndEngines(2) as (client, engines), another(engines) as other:
        engines.runners[0].gate.clear()
        stream = await client.generate(resumable())
        await stream.detach()
        known = await part(other)
        lost = replace(known, part=structs.replace(known.part, request_id="s-0~7"))
        assert (await rest(await other.adopt(resumable(), lost))).token_ids == ALL


@scenario
async def test_a_stream_without_a_reader_is_aborted() -> None:
    async with ClientAndEngines(streams=StreamSettings(detached_s=0.2)) as (client, engines):
        engines.runners[0].step_s = 0.05
        stream = await client.generate(structs.replace(resumable(), sampling=request("", 240).sampling))
        await read(stream, 1)
        await stream.detach()
        await until(lambda: is_nothing_left(client, engines))
        assert (await part(client)).part.finish_reason == "abort"


@scenario
async def test_a_stream_that_nobody_asks_for_is_forgotten() -> None:
    async with ClientAndEngines(streams=StreamSettings(keep_s=0.1)) as (client, engines):
        await rest(await client.generate(resumable()))
        wire = engines.replicas[0].wire
        await until(lambda: wire.num_kept == 0)
        assert await client.find("s", "tenant") is None
        assert (wire.num_detached, wire.detached_bytes) == (0, 0)


@scenario
async def test_a_request_may_ask_to_be_generated_longer_without_a_reader() -> None:
    streams = StreamSettings(detached_s=0.0)
    async with ClientAndEngines(streams=streams) as (client, engines), another(engines) as other:
        engines.runners[0].gate.clear()
        stream = await client.generate(resumable(detached_s=600.0))
        await stream.detach()
        await until(lambda: engines.replicas[0].wire.num_detached == 1)
        engines.runners[0].gate.set()
        assert (await rest(await other.adopt(resumable(), await part(other)))).token_ids == ALL


@scenario
async def test_the_streams_without_a_reader_are_bounded_for_each_tenant() -> None:
    streams = StreamSettings(max_kept=2, detached_s=600.0)
    async with ClientAndEngines(streams=streams, max_running=8) as (client, engines):
        engines.runners[0].gate.clear()
        streams_of = [("a", "one"), ("b", "one"), ("c", "two"), ("d", "one")]
        for name, tenant in streams_of:
            await (await client.generate(resumable(name, tenant=tenant))).detach()
            await until(lambda: client.num_streams == 0)
        await until(lambda: engines.replicas[0].wire.num_detached == 3)
        assert [await client.find(*each) is not None for each in streams_of] == [False, True, True, True]
        engines.runners[0].gate.set()
        await until(lambda: not engines.replicas[0].engine.loop.has_work)


@scenario
async def test_the_bytes_without_a_reader_are_bounded_for_each_tenant() -> None:
    streams = StreamSettings(max_kept_bytes=300, detached_s=600.0)
    async with ClientAndEngines(streams=streams) as (client, engines):
        engines.runners[0].gate.clear()
        for name in "ab":
            await (await client.generate(resumable(name, record=b"x" * 200))).detach()
            await until(lambda: client.num_streams == 0)
        await until(lambda: engines.replicas[0].wire.num_kept == 1)
        assert await client.find("a", "tenant") is None
        assert await client.find("b", "tenant") is not None


@scenario
async def test_a_request_that_is_not_resumable_is_aborted_and_not_found() -> None:
    async with ClientAndEngines() as (client, engines):
        engines.runners[0].gate.clear()
        stream = await client.generate(request("s-0", NUM_TOKENS))
        await stream.detach()
        assert await client.find("s", "tenant") is None
        engines.runners[0].gate.set()
        await until(lambda: is_nothing_left(client, engines))


@scenario
async def test_the_requests_of_one_stream_are_found_together() -> None:
    async with ClientAndEngines(2) as (client, engines), another(engines) as other:
        engines.choose = lambda names: names[len(engines.calls) % 2]
        await asyncio.gather(*[rest(await client.generate(resumable(index=index))) for index in range(2)])
        parts = (await found(other)).parts
        assert {index: part.replica for index, part in parts.items()} == {0: "r0", 1: "r1"}


@pytest.mark.parametrize("num_replicas", [1, 2])
@scenario
async def test_a_stream_of_the_same_name_is_each_tenants_own(num_replicas: int) -> None:
    """A tenant who has seen the name of another one's stream can begin one with it, but not read the other."""
    async with ClientAndEngines(num_replicas) as (client, engines):
        engines.choose = lambda names: names[len(engines.calls) % len(names)]
        await rest(await client.generate(resumable(tenant="one", record=b"one's")))
        shorter = structs.replace(resumable(tenant="two", record=b"two's"), request_id="s-0-b")
        await rest(await client.generate(structs.replace(shorter, sampling=request("", 2).sampling)))
        for tenant, num_tokens in (("one", NUM_TOKENS), ("two", 2)):
            own = await client.find("s", tenant)
            assert own is not None
            assert own.record == f"{tenant}'s".encode()
            assert own.parts[0].part.num_tokens == num_tokens
        assert await client.find("s", "three") is None
