"""While there is no engine, requests wait for one: in the queue, or where they lost theirs before a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deployments.admission.admission import Admission
from deployments.admission.fleet_load import FleetLoad
from deployments.client.model_client import ModelClient
from deployments.client.protocol import GenerateRequest, ModelState, Overloaded, Unavailable
from deployments.config.settings import AdmissionSettings
from tests.deployments.support.in_process_engines import (
    ClientAndEngines,
    InProcessEngines,
    request,
    until,
)
from tests.deployments.support.time_limit import run_scenario

TOKENS = [1, 2, 3, 4, 5]


class Switch:
    """Knows a model's state, as Serve's controller does."""

    def __init__(self) -> None:
        self.current: ModelState = "loaded"

    async def state(self) -> ModelState:
        return self.current

    load = unload = state


class Service:
    """A model's engines behind their queue."""

    def __init__(self, client: Any, engines: InProcessEngines, admission: Admission) -> None:
        self.engines, self.admission, self.switch = engines, admission, Switch()
        self.connections = client
        self.client = ModelClient(client, admission, self.switch)
        self._addresses = engines.fleet.addresses()

    async def answer(self, asked: GenerateRequest) -> list[int]:
        return [token async for delta in await self.client.generate(asked) for token in delta.token_ids]

    def ask(self, name: str, **fields: Any) -> asyncio.Task[list[int]]:
        return asyncio.create_task(self.answer(request(name, **fields)))

    async def lose_engines(self) -> None:
        """Have Serve know of no replica."""
        self.engines.fleet.update({})
        await until(lambda: not self.connections.reachable())

    def return_engines(self) -> None:
        self.engines.fleet.update(self._addresses)


@asynccontextmanager
async def service(
    *, count: int = 1, settings: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Service]:
    async with ClientAndEngines(count, **config) as (client, engines):
        load = FleetLoad(engines.fleet, lambda r: len(r.prompt_ids), lambda: client.expects_engines)
        made = Service(client, engines, Admission(load, AdmissionSettings(**(settings or {})), {}))
        if count:
            await until(lambda: client.expects_engines)
        yield made


def test_new_requests_wait_in_the_queue_for_the_next_engine() -> None:
    async def scenario() -> None:
        async with service() as made:
            await made.lose_engines()
            asked = [made.ask(f"r{n}") for n in range(8)]
            await until(lambda: made.admission.num_waiting == 8)
            made.return_engines()
            assert await asyncio.gather(*asked) == [TOKENS] * 8

    run_scenario(scenario())


def test_the_queue_s_limits_hold_while_there_is_no_engine() -> None:
    async def scenario() -> None:
        async with service(settings={"max_waiting_per_tenant": 2, "max_wait_s": 0.3}) as made:
            await made.lose_engines()
            asked = [made.ask(f"r{n}") for n in range(2)]
            await until(lambda: made.admission.num_waiting == 2)
            with pytest.raises(Overloaded, match="max_waiting_per_tenant"):
                await made.ask("r2")
            for waiting in asked:
                with pytest.raises(Unavailable, match=r"no engine was up within 0.3 s \(admission.max_wait_s"):
                    await waiting
            with pytest.raises(Unavailable, match=r"within 0\.05 s"):
                await made.ask("r3", max_wait_s=0.05)
            assert made.admission.num_waiting == 0

    run_scenario(scenario())


def test_a_client_that_leaves_while_there_is_no_engine_gives_its_place_back() -> None:
    async def scenario() -> None:
        async with service() as made:
            await made.lose_engines()
            asked = made.ask("r")
            await until(lambda: made.admission.num_waiting == 1)
            asked.cancel()
            await until(lambda: made.admission.num_waiting == made.connections.num_streams == 0)

    run_scenario(scenario())


def test_a_request_whose_only_engine_is_lost_before_the_first_token_waits_for_the_next() -> None:
    """With no limit of retries used up: that there is none is no loss."""

    async def scenario() -> None:
        async with service(health={"lost_after_s": 60.0, "max_retries": 1}) as made:
            [runner], [replica] = made.engines.runners, made.engines.replicas
            runner.gate.clear()
            asked = [made.ask(f"r{n}") for n in range(3)]
            # Its first step may begin before all have arrived, and sees no further ones before it ends.
            await until(lambda: replica.engine.loop.load().num_running > 0 and made.connections.num_streams == 3)
            made.engines.fall_silent(0)
            made.connections.on_answering("r0", False)  # what its connection reports after `lost_after_s`
            assert not made.connections.reachable()
            runner.gate.set()
            await asyncio.sleep(0.3)
            made.engines.speak(0)
            assert await asyncio.gather(*asked) == [TOKENS] * 3

    run_scenario(scenario())


def test_a_request_that_no_replica_takes_over_in_time_is_refused() -> None:
    async def scenario() -> None:
        health = {"lost_after_s": 0.6, "migration_wait_s": 0.3}
        async with service(health=health) as made:
            made.engines.runners[0].gate.clear()
            asked = made.ask("r")
            await until(lambda: made.engines.replicas[0].engine.loop.load().num_running == 1)
            made.engines.fall_silent(0)
            with pytest.raises(Unavailable, match="no engine replica is up"):
                await asked

    run_scenario(scenario())


def test_a_service_that_has_had_no_engine_yet_refuses_immediately() -> None:
    async def scenario() -> None:
        async with service(count=0) as made:
            made.switch.current = "loading"
            with pytest.raises(Unavailable, match="model m is loading"):
                await made.ask("r")

    run_scenario(scenario())


@pytest.mark.parametrize("state", ["unloaded", "draining"])
def test_an_unloaded_model_refuses_new_and_waiting_requests_immediately(state: ModelState) -> None:
    async def scenario() -> None:
        async with service() as made:
            await made.lose_engines()
            waiting = made.ask("r0")
            await until(lambda: made.admission.num_waiting == 1)
            made.switch.current = state
            for asked in (made.ask("r1"), waiting):
                with pytest.raises(Unavailable, match="model m is not loaded"):
                    await asked

    run_scenario(scenario())
