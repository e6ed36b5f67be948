"""An application whose replicas have two stages of two ranks answers as one with one rank, whatever is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import Service, running

pytestmark = pytest.mark.e2e

ARGUMENTS = {
    "engine": {
        "model": "demo",
        "kv_pages": 1024,
        "threads": 1,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
    },
    "engines": {"count": 2, "num_cpus": 0.1, "drain_timeout_s": 5},
    "ingresses": {"num_cpus": 0.1, "drain_timeout_s": 5},
}


@pytest.fixture
def parallel(service: Service) -> Iterator[Service]:
    """An application of its own beside the session's."""
    with running("parallel", ARGUMENTS) as parallel:
        yield parallel


def body(number: int, max_tokens: int, stream: bool = True) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": f"{number}: what does this function do?",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


def answer(service: Service, number: int, max_tokens: int) -> str:
    found = httpx.post(f"{service.url}/v1/completions", json=body(number, max_tokens, False), timeout=180)
    text: str = found.json()["choices"][0]["text"]
    return text


def ranks() -> list[int]:
    """Processes of ranks after the first, of this test session's Ray."""
    return [
        process.pid
        for process in psutil.Process(os.getpid()).children(recursive=True)
        if "ray::Rank" in "".join(process.cmdline())
    ]


def test_the_streams_of_a_killed_rank_continue_at_the_other_replica(service: Service, parallel: Service) -> None:
    assert answer(parallel, 0, 24) == answer(service, 0, 24)
    assert len(ranks()) == 6
    replicas: set[str] = set()
    both = asyncio.Event()

    async def read(client: httpx.AsyncClient, number: int) -> str:
        texts = []
        async with client.stream("POST", "/v1/completions", json=body(number, 600)) as response:
            replicas.add(response.headers["x-raydix-replica"])
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    texts += [choice["text"] for choice in chunk["choices"]]
                    if len(replicas) == 2:
                        both.set()
        assert line == "" or line.endswith("[DONE]")
        return "".join(texts)

    async def scenario() -> list[str]:
        async with httpx.AsyncClient(base_url=parallel.url, timeout=180) as client:
            readers: list[asyncio.Task[str]] = []
            while not both.is_set():
                readers.append(asyncio.create_task(read(client, len(readers))))
                await asyncio.wait([asyncio.create_task(both.wait())], timeout=0.5)
                assert len(readers) < 16, f"all are on {replicas}"
            os.kill(ranks()[0], signal.SIGKILL)
            return await asyncio.gather(*readers)

    texts = asyncio.run(scenario())
    assert parallel.metric("raydix_migrations_total", outcome="resumed") >= 1
    assert texts == [answer(service, number, 600) for number in range(len(texts))]
