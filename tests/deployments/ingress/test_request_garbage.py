"""What a request leaves in an ingress' process: no objects that wait for a collection of garbage, and no task.

Each that did would stay until a full collection or a deadline, so the process would grow with every request.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deployments.ingress.http_server import HttpServer
from tests.deployments.support.api_over_engines import PROMPT, Api, api_over
from tests.deployments.support.served_api import serving

NUM = 20
CLIENT = """
import http.client, json, sys

port, path, body = int(sys.argv[1]), sys.argv[2], sys.argv[3]
for num in sys.stdin:
    client = http.client.HTTPConnection("127.0.0.1", port)
    for _ in range(int(num)):
        client.request("POST" if body else "GET", path, body or None, {"content-type": "application/json"})
        client.getresponse().read()
    client.close()
    print("done", flush=True)
"""
PROMPTED: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ASKS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "models": ("/v1/models", None),
    "completion": ("/v1/completions", PROMPTED),
    "stream": ("/v1/completions", PROMPTED | {"stream": True}),
    "refused by a check": ("/v1/completions", PROMPTED | {"max_tokens": -1}),
    "refused by an engine": ("/v1/completions", PROMPTED | {"max_tokens": 400}),
    "chat": ("/v1/chat/completions", CHAT),
    "response": ("/v1/responses", {"model": "m", "input": "hi", "max_output_tokens": 16}),
    "message": ("/v1/messages", CHAT),
    "no such path": ("/v1/nothing", None),
}


@asynccontextmanager
async def asking(port: int, kind: str) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Yield what sends so many requests on a connection, from another process: its client leaves nothing here."""
    path, body = ASKS[kind]
    arguments = str(port), path, "" if body is None else json.dumps(body)
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdin is not None and client.stdout is not None
    told, heard = client.stdin, client.stdout

    async def ask(num: int) -> None:
        told.write(b"%d\n" % num)
        assert await heard.readline() == b"done\n"

    yield ask
    told.close()
    assert await client.wait() == 0


def num_tasks() -> int:
    return sum(isinstance(each, asyncio.Task) for each in gc.get_objects())


async def garbage_of(api: Api, server: HttpServer, ask: Callable[[int], Awaitable[None]]) -> tuple[int, int]:
    """Return how many objects wait for a collection after requests, and how many tasks stay after it."""
    gc.collect()
    num_before = num_tasks()
    await ask(NUM)
    while server.num_connections or api.client.num_streams:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)  # tasks that have ended are freed by the loop
    return gc.collect(), num_tasks() - num_before


@pytest.mark.parametrize("kind", ASKS)
def test_a_request_leaves_no_garbage_and_no_task(kind: str) -> None:
    async def scenario() -> None:
        async with (
            api_over(1) as api,
            serving(api.app) as (port, server),
            asking(port, kind) as ask,
        ):
            await ask(5)  # what is made once
            # Less than one object for each request: the few are those of the one connection.
            # The least of three looks: what other tests left may become garbage meanwhile.
            looks = [await garbage_of(api, server, ask)]
            while (least := [*map(min, zip(*looks, strict=True))]) and max(least) >= NUM and len(looks) < 3:
                looks.append(await garbage_of(api, server, ask))
            garbage, tasks = least
            assert garbage < NUM and tasks < NUM

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()
