"""Requests that come together: each leaves as soon as it is planned, and none is left behind."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from deployments.client.protocol import GenerateRequest, Unavailable
from deployments.client.remote_engines import RemoteEngines
from deployments.wire.messages import Abort, Generate
from tests.deployments.support.api_over_engines import api_over
from tests.deployments.support.in_process_engines import (
    TIMINGS,
    ClientAndEngines,
    InProcessEngines,
    is_nothing_left,
    request,
    router_like,
    until,
)
from tests.deployments.support.lossy_link import Noted
from tests.deployments.support.time_limit import run_scenario

NUM_REQUESTS = 32


def sent(engines: InProcessEngines) -> list[Generate | Abort]:
    """Return the list to which each request, and each abort, is added when it leaves for the first replica."""
    noted = Noted(lambda message: isinstance(message, Generate | Abort))
    engines.links["r0"].to_replica = noted
    return noted.messages


def test_the_first_of_a_burst_leaves_before_the_second_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bodies are there in the same turn of the event loop, through the API to the socket."""
    num_sent_when_planned: list[int] = []

    async def scenario() -> None:
        async with api_over(1, kv_pages=1024, max_running=NUM_REQUESTS, max_waiting=NUM_REQUESTS) as api:
            await until(lambda: bool(api.client.num_synced))
            messages, prepared = sent(api.engines), api.client.prepared

            def note(asked: GenerateRequest) -> GenerateRequest:
                num_sent_when_planned.append(len(messages))
                return prepared(asked)

            monkeypatch.setattr(api.client, "prepared", note)
            answers = await asyncio.gather(*(api.complete() for _ in range(NUM_REQUESTS)))
            assert {answer.status_code for answer in answers} == {httpx.codes.OK}

    run_scenario(scenario())
    assert num_sent_when_planned == list(range(NUM_REQUESTS))


def test_a_request_whose_task_is_cancelled_before_it_begins_is_aborted() -> None:
    """The ingress stops in the turn of the event loop in which the request was sent."""

    async def scenario() -> None:
        async with ClientAndEngines(1) as (_, engines):
            client = RemoteEngines(router_like(engines), 1, timings=TIMINGS, open_link=engines.links.open)
            await client.start()
            await until(lambda: bool(client.num_synced))
            engines.runners[0].gate.clear()
            messages = sent(engines)
            generating = asyncio.create_task(client.generate(request("a", max_tokens=200)))
            stopping = asyncio.create_task(client.aclose())
            with pytest.raises(Unavailable, match="is being stopped"):
                await generating
            await stopping
            first, *others = [(type(message), message.request_id) for message in messages]
            assert first == (Generate, "a")
            # The client repeats the abort if a delta of the request arrives before it has disconnected.
            assert others and set(others) == {(Abort, "a")}
            engines.runners[0].gate.set()
            await until(lambda: is_nothing_left(client, engines))

    run_scenario(scenario())
