"""One replica becomes two under load and one again after it, and clients notice only how fast they are served.

The load waits in the ingress: engines get no more than they have places for, and use of all places is allowed. So
the second replica comes because of what the ingress reports.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Service, running

pytestmark = pytest.mark.e2e

ARGUMENTS = {
    "engine": {"model": "demo", "kv_pages": 1024, "max_running": 4, "threads": 1},
    "engines": {
        "num_cpus": 0.1,
        "drain_timeout_s": 600,
        "autoscaling": {
            "min": 1,
            "max": 2,
            "ttft_target_s": 0.5,
            "catch_up_s": 5.0,
            "max_busy_share": 1.0,
            "max_kv_share": 1.0,
            "upscale_delay_s": 0.5,
            "downscale_delay_s": 1.5,
            "look_back_s": 1.5,
            "report_s": 0.5,
        },
    },
    "ingresses": {"num_cpus": 0.1, "drain_timeout_s": 600},
    "admission": {"ttft_target_s": 0.001, "max_wait_s": 300.0},  # a slow machine is no failure
}


@pytest.fixture
def scaled(service: Service) -> Iterator[Service]:
    """An application of its own beside the session's."""
    with running("scaled", ARGUMENTS, lambda scaled: num_up(scaled) == 1) as scaled:
        yield scaled


def num_up(service: Service) -> int:
    return sum(state["is_connected"] and not state["is_draining"] for state in service.replicas().values())


def story_stream(
    client: httpx.AsyncClient, number: int, max_tokens: int
) -> AbstractAsyncContextManager[httpx.Response]:
    body = {
        "model": "demo",
        "prompt": f"{number}: what does this function do?",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return client.stream("POST", "/v1/completions", json=body)


async def whole_text(response: httpx.Response, max_tokens: int) -> str:
    """A stream's text; an error when it is not complete, to the token."""
    assert response.status_code == 200, await response.aread()
    lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines[-1] == "[DONE]", lines[-3:]
    chunks: list[dict[str, Any]] = [json.loads(line) for line in lines[:-1]]
    assert not [chunk for chunk in chunks if "error" in chunk]
    assert chunks[-1]["usage"]["completion_tokens"] == max_tokens
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def story(client: httpx.AsyncClient, number: int, max_tokens: int) -> str:
    async with story_stream(client, number, max_tokens) as response:
        return await whole_text(response, max_tokens)


def test_the_fleet_scales_from_one_to_two_to_one_without_a_dropped_stream(scaled: Service) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=scaled.url, timeout=120) as client:
            # Long enough that requests are in the engine rather than on their way to it, on a fast machine too.
            alone = [await story(client, number, 120) for number in range(4)]
            texts: list[tuple[int, str]] = []
            is_enough = asyncio.Event()

            async def user(number: int) -> None:
                while not is_enough.is_set():
                    texts.append((number, await story(client, number % 4, 120)))

            users = [asyncio.create_task(user(number)) for number in range(32)]
            await asyncio.to_thread(scaled.wait_until, lambda: num_up(scaled) == 2)
            # One long stream on each and the next when it ends (how long it lasts is up to the machine): too few
            # to need two replicas, so that one drains with a stream on it.
            has_drained = asyncio.Event()
            read: set[str] = set()

            async def reader(number: int) -> None:
                while not has_drained.is_set():
                    number += 2
                    async with story_stream(client, number, 600) as response:
                        replica = response.headers["x-raydix-replica"]
                        if replica in read:
                            await asyncio.sleep(0.3)  # a client that asks without a pause is load of its own
                            continue
                        read.add(replica)
                        assert await whole_text(response, 600)
                        read.discard(replica)

            readers = [asyncio.create_task(reader(number)) for number in range(2)]
            await asyncio.to_thread(scaled.wait_until, lambda: len(read) == 2)
            is_enough.set()
            await asyncio.to_thread(scaled.wait_until, lambda: num_up(scaled) == 1)
            has_drained.set()
            await asyncio.gather(*users, *readers)
            assert all(text == alone[number % 4] for number, text in texts)
            await asyncio.to_thread(scaled.wait_until, lambda: num_up(scaled) == 1)
            assert await story(client, 0, 120) == alone[0]

    asyncio.run(scenario())
    assert scaled.metric("raydix_migrations_total") == 0  # they ended where they began
