"""Clients connect to the ingresses themselves, at one port: one is killed, and the application is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from ray import serve

from tests.e2e.conftest import Service, running
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e

LONG = {"model": "demo", "prompt": "A long story", "max_tokens": 2000, "ignore_eos": True, "stream": True}
KILLED = {**LONG, "max_tokens": 400}
"""Lasts for seconds where 16 such streams are computed together."""
SHORT = {"model": "demo", "prompt": "Return the", "max_tokens": 2}


@pytest.fixture(scope="module")
def direct(service: Service) -> Iterator[Service]:
    """An application with two ingresses, which share a port."""
    arguments = {
        "engine": {"model": "demo", "kv_pages": 1024, "threads": 1},
        "engines": {"num_cpus": 0.1, "drain_timeout_s": 600},
        "ingresses": {"count": 2, "num_cpus": 0.1, "drain_timeout_s": 600, "shutdown_delay_s": 5},
    }
    with running("direct", arguments) as direct:
        yield direct


def ingresses() -> set[int]:
    """Return the process ids of the application's ingresses."""
    processes = psutil.Process(os.getpid()).children(recursive=True)
    return {process.pid for process in processes if "ServeReplica:direct:Ingress" in "".join(process.cmdline())}


async def has_begun(lines: Any) -> bool:
    return str(await anext(lines)).startswith("data:")


async def rest_of(lines: Any) -> list[str]:
    return [line async for line in lines if line]


def test_answers_bear_the_request_s_id_and_errors_are_objects(direct: Service) -> None:
    with httpx.Client(base_url=direct.url, timeout=60) as client:
        answer = client.post("/v1/completions", json=SHORT, headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
        for response in (client.get("/nowhere"), client.put("/v1/completions"), client.post("/v1/completions")):
            assert response.json()["error"]["message"] and response.headers["x-request-id"]


def test_when_an_ingress_is_killed_the_others_streams_continue_and_connections_are_answered(
    direct: Service,
) -> None:
    """Connections go to both, so that of many streams some are at either. Those of the killed one break."""

    async def scenario() -> None:
        client = httpx.AsyncClient(base_url=direct.url, timeout=120, limits=httpx.Limits(max_connections=None))
        async with client:
            requests = [client.build_request("POST", "/v1/completions", json=KILLED) for _ in range(16)]
            streams = await asyncio.gather(*(client.send(request, stream=True) for request in requests))
            every = [stream.aiter_lines() for stream in streams]
            assert all(await asyncio.gather(*map(has_begun, every)))
            before = ingresses()
            assert len(before) == 2
            os.kill(min(before), signal.SIGKILL)
            ends = await asyncio.gather(*map(rest_of, every), return_exceptions=True)
            whole = [end for end in ends if isinstance(end, list) and end[-1] == "data: [DONE]"]
            broken = [end for end in ends if isinstance(end, httpx.RemoteProtocolError)]
            assert len(whole) + len(broken) == len(ends)
            for _ in range(20):
                answer = await client.post("/v1/completions", json=SHORT, headers={"connection": "close"})
                assert answer.status_code == 200

        def are_replaced() -> bool:
            return len(ingresses()) == 2 and min(before) not in ingresses()

        await asyncio.to_thread(direct.wait_until, are_replaced)

    asyncio.run(scenario())


def is_unready(service: Service) -> bool:
    """Return whether an ingress that still takes connections says that it should get none."""
    answer = httpx.get(f"{service.url}/ready", timeout=60)
    return answer.status_code == 503 and "stopped" in answer.json()["reason"]


def test_a_stopped_application_reports_it_then_closes_the_port_and_lets_streams_end(direct: Service) -> None:
    async def scenario() -> None:
        async with (
            httpx.AsyncClient(base_url=direct.url, timeout=120) as client,
            client.stream("POST", "/v1/completions", json=LONG) as response,
        ):
            lines = response.aiter_lines()
            assert await has_begun(lines)
            serve.delete("direct", _blocking=False)
            await asyncio.to_thread(direct.wait_until, lambda: is_unready(direct))
            assert (await rest_of(lines))[-1] == "data: [DONE]"

    asyncio.run(scenario())

    def is_closed() -> bool:
        try:
            httpx.get(f"{direct.url}/health", timeout=5)
        except httpx.ConnectError:
            return True
        return False

    deadline = time.monotonic() + PATIENCE_S
    while not is_closed():
        assert time.monotonic() < deadline
        time.sleep(0.1)
