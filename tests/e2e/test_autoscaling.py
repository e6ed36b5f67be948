"""One replica becomes three under load and one again after it, and no client notices more than its own speed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ray import serve

from deployments.app import build
from deployments.config import AppArgs
from tests.e2e.conftest import Service

pytestmark = pytest.mark.e2e

ARGUMENTS = {
    "engine": {"model": "demo", "kv_pages": 1024, "max_running": 8, "threads": 1},
    "engines": {
        "num_cpus": 0.1,
        "autoscaling": {
            "min": 1,
            "max": 3,
            "ttft_target_s": 0.5,
            "upscale_delay_s": 0.5,
            "downscale_delay_s": 1.5,
            "look_back_s": 1.5,
            "report_s": 0.5,
        },
    },
    "ingresses": {"num_cpus": 0.1},
}


@pytest.fixture
def scaled(service: Service) -> Iterator[Service]:
    """An application of its own beside the session's."""
    serve.run(build(AppArgs.model_validate(ARGUMENTS)), name="scaled", route_prefix="/scaled")
    running = Service(f"{service.url}/scaled")
    running.wait_until(lambda: num_up(running) == 1)
    yield running
    serve.delete("scaled")


def num_up(service: Service) -> int:
    return sum(state["is_connected"] and not state["is_draining"] for state in service.replicas().values())


async def story(client: httpx.AsyncClient, number: int, max_tokens: int) -> str:
    """A stream's text; an error when it is not complete, to the token."""
    body = {
        "model": "demo",
        "prompt": f"What does function {number % 4} do?",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    lines = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line:
                lines.append(line.removeprefix("data: "))
    assert lines[-1] == "[DONE]", lines[-3:]
    chunks: list[dict[str, Any]] = [json.loads(line) for line in lines[:-1]]
    assert not [chunk for chunk in chunks if "error" in chunk]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert chunks[-1]["usage"]["completion_tokens"] == max_tokens
    return text


def test_one_three_one_without_a_dropped_stream(scaled: Service) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=scaled.url, timeout=120) as client:
            alone = [await story(client, number, 24) for number in range(4)]
            texts: list[tuple[int, str]] = []
            is_enough = asyncio.Event()

            async def user(number: int) -> None:
                while not is_enough.is_set():
                    texts.append((number, await story(client, number, 24)))

            users = [asyncio.create_task(user(number)) for number in range(32)]
            await asyncio.to_thread(scaled.wait_until, lambda: num_up(scaled) == 3, 60)
            # Long streams on all three, too few to need them: when the others end, one drains with streams on it.
            long = [asyncio.create_task(story(client, number, 600)) for number in range(9)]
            await asyncio.sleep(0.5)
            is_enough.set()
            await asyncio.gather(*users)
            assert all(text == alone[number % 4] for number, text in texts)
            await asyncio.to_thread(scaled.wait_until, lambda: is_draining_with_streams(scaled), 30)
            await asyncio.gather(*long)
            await asyncio.to_thread(scaled.wait_until, lambda: num_up(scaled) == 1, 30)
            assert await story(client, 0, 24) == alone[0]

    asyncio.run(scenario())
    assert scaled.metric("raydix_migrations_total") == 0  # they ended where they began


def is_draining_with_streams(service: Service) -> bool:
    return any(state["is_draining"] and state["num_running"] for state in service.replicas().values())
