"""A replica that Serve is stopping finishes its streams; new requests go elsewhere."""

from __future__ import annotations

import asyncio

import pytest

from deployments.client.protocol import Unavailable
from tests.deployments.support.in_process_engines import ClientAndEngines, request, until
from tests.deployments.support.time_limit import run_scenario


def test_a_draining_replica_ends_its_streams_and_new_ones_go_elsewhere() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(2) as (client, engines):
            engines.runners[0].step_s = 0.01
            before = await client.generate(request("before", max_tokens=40))
            await until(lambda: before.replica == "r0")
            engines.stopping.add("r0")
            after = await client.generate(request("after", max_tokens=5))  # the router does not know yet
            assert [token async for event in after for token in event.token_ids] == [1, 2, 3, 4, 5]
            assert (after.replica, engines.calls) == ("r1", ["r0", "r0", "r1"])
            assert [token async for event in before for token in event.token_ids] == list(range(1, 41))
            assert before.replica == "r0"

    run_scenario(scenario())


def test_a_request_waits_a_moment_for_the_successor_of_the_only_replica() -> None:
    """The replica knows that it is being stopped before its ingresses know of another."""

    async def scenario() -> None:
        async with ClientAndEngines(2) as (client, engines):
            every = engines.fleet.addresses()
            engines.fleet.update({"r0": every["r0"]})
            engines.stopping.add("r0")
            asked = asyncio.create_task(client.generate(request("early", max_tokens=5)))
            await until(lambda: bool(engines.calls))
            engines.fleet.update(every)
            stream = await asked
            assert [token async for event in stream for token in event.token_ids] == [1, 2, 3, 4, 5]
            assert (stream.replica, engines.calls) == ("r1", ["r0", "r1"])

    run_scenario(scenario())


def test_when_every_replica_drains_a_request_is_refused_after_a_wait() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(2, health={"migration_wait_s": 0.1}) as (client, engines):
            engines.stopping |= {"r0", "r1"}
            with pytest.raises(Unavailable, match="being stopped"):
                await client.generate(request("late"))

    run_scenario(scenario())
