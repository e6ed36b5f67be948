"""What an ingress does for a request does not grow with the replicas that it is connected to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from deployments.client.protocol import Unavailable
from deployments.client.remote_engines import RemoteEngines
from deployments.wire.handshake import Keys
from router.fleet import Fleet, ReplicaAddress
from router.placer import Placer
from router.state import RouterState
from tests.deployments.support.in_process_engines import request, until
from tests.deployments.support.time_limit import run_scenario
from tests.support.count_calls import count_calls


@asynccontextmanager
async def connecting(num_replicas: int) -> AsyncIterator[RemoteEngines]:
    """Yield a client of replicas that have not answered yet."""
    keys, fleet = Keys.drawn(), Fleet()
    secret, public = keys.ingress_secret.decode(), keys.public.decode()
    names = [f"r{number}" for number in range(num_replicas)]
    fleet.update({name: ReplicaAddress(name, "tcp://127.0.0.1:9", secret, 1, public) for name in names})
    engines = RemoteEngines(RouterState(fleet, Placer(fleet)), num_replicas)
    await engines.start()
    try:
        yield engines
    finally:
        await engines.aclose()


def test_which_replicas_can_be_reached_is_found_out_when_one_changes_and_not_for_every_request() -> None:
    async def steps(num_replicas: int) -> int:
        async with connecting(num_replicas) as engines:
            reachable = engines._dispatch.reachable
            assert len(reachable()) == num_replicas
            return count_calls(reachable)

    async def scenario() -> None:
        assert await steps(256) == await steps(16)

    run_scenario(scenario())


def test_a_replica_that_falls_silent_or_leaves_is_not_reached_from_that_moment_on() -> None:
    async def scenario() -> None:
        async with connecting(3) as engines:
            reachable = engines._dispatch.reachable
            assert reachable() == {"r0", "r1", "r2"}
            engines._connections["r1"].suspect()
            assert reachable() == {"r0", "r2"}
            engines.on_answering("r1", True)  # its connection still says that it is lost
            assert reachable() == {"r0", "r2"}
            addresses = engines.fleet.addresses()
            engines.fleet.update({"r0": addresses["r0"], "r1": addresses["r1"]})
            assert reachable() == {"r0"}
            engines.fleet.update({})
            with pytest.raises(Unavailable):
                await engines.generate(request("a"))

    run_scenario(scenario())


def test_a_tick_and_a_hello_take_no_more_steps_for_streams_at_other_replicas() -> None:
    async def steps(num_streams: int) -> int:
        async with connecting(2) as engines:
            engines.on_answering("r1", False)
            tasks = [asyncio.create_task(engines.generate(request(f"s{n}"))) for n in range(num_streams)]
            await until(lambda: len(list(engines.unanswered("r0"))) == num_streams)
            engines._sync()

            def hear_from_the_other() -> None:
                engines._sync()
                assert not engines.received("r1") and not list(engines.unanswered("r1"))
                engines._dispatch.lose("r1", "silent", "it does not answer")

            count = count_calls(hear_from_the_other)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return count

    async def scenario() -> None:
        assert await steps(256) == await steps(16)

    run_scenario(scenario())
