"""What an ingress does for a request does not grow with the replicas that it is connected to."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest

from deployments.client.attempt import ClientTimings
from deployments.client.connector import TURN_CONNECTIONS
from deployments.client.protocol import Unavailable
from deployments.client.remote_engines import RemoteEngines
from deployments.wire.handshake import Keys
from deployments.wire.open_files import allow_open_files
from router.addresses import ReplicaAddress
from router.fleet import Fleet
from router.placer import Placer
from router.state import RouterState
from tests.deployments.support.forked import forked
from tests.deployments.support.in_process_engines import request, until
from tests.deployments.support.time_limit import run_scenario
from tests.support.count_calls import count_calls


@asynccontextmanager
async def connecting(num_replicas: int, timings: ClientTimings | None = None) -> AsyncIterator[RemoteEngines]:
    """Yield a client of replicas that have not answered yet."""
    keys, fleet = Keys.drawn(), Fleet()
    secret, public = keys.ingress_secret.decode(), keys.public.decode()
    names = [f"r{number}" for number in range(num_replicas)]
    fleet.update({name: ReplicaAddress(name, "tcp://127.0.0.1:9", secret, 1, public) for name in names})
    engines = RemoteEngines(RouterState(fleet, Placer(fleet)), num_replicas, timings=timings)
    await engines.start()
    try:
        yield engines
    finally:
        await engines.aclose()


def test_which_replicas_can_be_reached_is_found_out_when_one_changes_and_not_for_every_request() -> None:
    async def steps(num_replicas: int) -> int:
        async with connecting(num_replicas) as engines:
            reachable = engines.reachable
            assert len(reachable()) == num_replicas
            return count_calls(reachable)

    async def scenario() -> None:
        assert await steps(256) == await steps(16)

    run_scenario(scenario())


def test_a_replica_that_falls_silent_or_leaves_is_not_reached_from_that_moment_on() -> None:
    async def scenario() -> None:
        async with connecting(3, ClientTimings(accept_s=0.5)) as engines:
            reachable = engines.reachable
            assert reachable() == {"r0", "r1", "r2"}
            engines.on_answering("r1", False)
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
            engines._connector.sync()

            def hear_from_the_other() -> None:
                engines._connector.sync()
                assert not engines.received("r1") and not list(engines.unanswered("r1"))
                engines.on_answering("r1", False)

            count = count_calls(hear_from_the_other)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return count

    async def scenario() -> None:
        assert await steps(256) == await steps(16)

    run_scenario(scenario())


def test_more_replicas_are_connected_to_than_zeromq_has_sockets_by_default() -> None:
    async def scenario() -> None:
        async with connecting(1100) as engines:
            assert len(engines.reachable()) == 1100

    allow_open_files()
    run_scenario(scenario())


def connect_with(files: tuple[int, int], answer: Connection) -> None:
    """Connect to 200 replicas in a process with these limits of open files; tell how many it were, and the log."""
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    logged: list[str] = []
    logging.getLogger("ray.serve").addHandler(handler := logging.Handler())
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]

    async def scenario() -> None:
        allow_open_files()
        async with connecting(200, ClientTimings(tick_s=0.01)) as engines:
            await asyncio.sleep(0.1)  # it tries again
            answer.send((len(engines.reachable()), logged))

    run_scenario(scenario())


@pytest.mark.parametrize("hard", [150, 1000])
def test_the_limit_of_open_files_is_raised_and_one_that_stays_too_low_is_logged(hard: int) -> None:
    ours, theirs = forked().Pipe()
    process = forked().Process(target=connect_with, args=((100, hard), theirs), daemon=True)
    process.start()
    assert ours.poll(100), "it has not answered"
    num_connected, logged = ours.recv()
    process.join(60)
    if hard == 1000:
        assert (num_connected, logged) == (200, [])
    else:
        assert 50 < num_connected < 200 and len(logged) == 1
        assert "of 200 replicas" in logged[0] and "hard limit is 150" in logged[0] and "ulimit -Hn" in logged[0]


def test_a_fleet_that_appears_is_connected_to_a_few_replicas_in_a_turn() -> None:
    async def scenario() -> None:
        async with connecting(1) as engines:
            [address] = engines.fleet.addresses().values()
            names = [f"r{number}" for number in range(100)]
            engines.fleet.update({name: replace(address, replica=name) for name in names})
            before, most = 1, 0
            while before < len(names):
                await asyncio.sleep(0)
                engines._connector.sync()  # as a tick does, and a request that finds no engine
                now = len(engines.reachable())
                before, most = now, max(most, now - before)
            assert 0 < most <= TURN_CONNECTIONS

    run_scenario(scenario())
