"""Streams over real engines, cut at one ingress and continued at another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.deployments.api.streams.conftest import EVENTS, events_of
from tests.deployments.support.api_over_engines import PROMPT, Api, api_over
from tests.deployments.support.in_process_engines import another, is_nothing_left, until

PATH = "/v1/completions"
ASK: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 12, "stream": True, "return_token_ids": True}


@asynccontextmanager
async def two_ingresses() -> AsyncIterator[tuple[Api, Api]]:
    async with api_over() as here, another(here.engines) as client:
        there = Api(client, here.engines, ())
        async with there.http:
            yield here, there


async def cut(api: Api, body: dict[str, Any], num_events: int) -> list[tuple[str, bytes]]:
    """Read the first events of a stream, then leave."""
    sent, enough = bytearray(), asyncio.Event()
    inbox = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        await enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.extend(message.get("body", b""))
        if sent.count(b"\n\n") >= num_events:
            enough.set()

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": PATH,
        "raw_path": PATH.encode(), "query_string": b"", "root_path": "", "scheme": "http", "server": ("t", 80),
        "client": ("test", 1), "headers": [(b"accept", b"text/event-stream")],
    }  # fmt: skip
    await asyncio.wait_for(api.app(scope, receive, send), 60)
    return events_of(bytes(sent))


def tokens_of(events: list[tuple[str, bytes]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for _, event in events:
        data = event.removeprefix(b"data: ")
        for choice in [] if data == b"[DONE]" else json.loads(data)["choices"]:
            found.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    return found


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_stream_that_was_cut_is_continued_at_another_ingress(num_choices: int, by_name: bool) -> None:
    async def scenario() -> None:
        async with two_ingresses() as (here, there):
            body = ASK | {"n": num_choices}
            runner = here.engines.runners[0]
            runner.step_s = 0.01
            whole = await here.http.post(PATH, json=body, headers=EVENTS)
            for num_events in (2, 5, 9):
                first = await cut(here, body, num_events)
                last, method = {"last-event-id": first[-1][0]}, "GET" if by_name else "POST"
                path = f"/v1/streams/{first[-1][0].partition(':')[0]}" if by_name else PATH
                rest = await there.http.request(method, path, json=None if by_name else body, headers=last)
                assert rest.status_code == 200, rest.text
                assert tokens_of([*first, *events_of(rest.content)]) == tokens_of(events_of(whole.content))
                assert rest.content.endswith(b"data: [DONE]\n\n")
            await until(lambda: is_nothing_left(here.client, here.engines) and there.client.num_streams == 0)

    asyncio.run(scenario())


def test_a_stream_is_ended_from_another_ingress() -> None:
    async def scenario() -> None:
        async with two_ingresses() as (here, there):
            here.engines.runners[0].step_s = 0.02
            first = await cut(here, ASK | {"max_tokens": 200}, 2)
            name = first[0][0].partition(":")[0]
            assert (await there.http.delete(f"/v1/streams/{name}")).json()["deleted"]
            while (found := await there.client.find(name, "anonymous")) is not None:
                if found.parts[0].part.finish_reason == "abort":
                    break
                await asyncio.sleep(0.01)
            here.engines.runners[0].step_s = 0.0
            rest = await there.http.get(f"/v1/streams/{name}", headers={"last-event-id": first[-1][0]})
            assert len(tokens_of([*first, *events_of(rest.content)])[0]) == 200  # generated again

    asyncio.run(scenario())
