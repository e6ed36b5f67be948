"""A stream that is cut after any event, and continued with any merging of its tokens, has the same events."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.client.protocol import FoundPart, FoundStream
from deployments.wire.messages import StreamPart
from tests.deployments.support.scripted_api import Client, ScriptedEngine

EVENTS = {"accept": "text/event-stream"}
CHAT = "/v1/chat/completions"
HELLO = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


def events_of(content: bytes) -> list[tuple[str, bytes]]:
    """Each event with its id."""
    events = []
    for event in content.split(b"\n\n")[:-1]:
        first, _, rest = event.partition(b"\n")
        assert first.startswith(b"id: "), event
        events.append((first[4:].decode(), rest))
    return events


def begin(client: Client, path: str, body: dict[str, Any]) -> list[tuple[str, bytes]]:
    answer = client.post(path, body, headers=EVENTS)
    assert answer.status_code == 200, answer.text
    return events_of(answer.content)


def resume(client: Client, path: str, body: dict[str, Any], last: str) -> list[tuple[str, bytes]]:
    answer = client.post(path, body, headers={"last-event-id": last})
    assert answer.status_code == 200, answer.text
    return events_of(answer.content)


def adoptable(engine: ScriptedEngine, last: str, num_parts: int = 1, **part: Any) -> str:
    """Let replicas have a stream, and return its name."""
    name = last.partition(":")[0]
    parts = {
        index: FoundPart("replica-1", StreamPart(index, f"r-{index}", part.get("num_tokens", 100)))
        for index in range(num_parts)
    }
    engine.found[name] = FoundStream("anonymous", b"", parts)
    return name


def test_a_stream_has_ids_only_if_its_client_names_the_type_of_events(client: Client) -> None:
    assert b"id: " not in client.post(CHAT, HELLO).content
    assert b"id: " not in client.post(CHAT, HELLO, headers={"accept": "application/json"}).content
    assert len({id for id, _ in begin(client, CHAT, HELLO)}) == len(begin(client, CHAT, HELLO))


@pytest.mark.parametrize("chunk, again", [(1, 1), (1, 5), (3, 1), (4, 100), (100, 2)])
@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_chat_is_continued_after_every_event(
    client: Client, engine: ScriptedEngine, chunk: int, again: int, is_adopted: bool
) -> None:
    engine.chunk = chunk
    body = HELLO | {"stream_options": {"include_usage": True}}
    whole = begin(client, CHAT, body)
    seed = engine.requests[-1].sampling.seed
    engine.chunk = again
    for at, (last, _) in enumerate(whole, 1):
        engine.requests.clear()
        if is_adopted:
            adoptable(engine, last)
        rest = resume(client, CHAT, body, last)
        if again == 1 and chunk == 1:
            assert rest == whole[at:]
        assert joined(rest) == joined(whole[at:])
        assert is_adopted or engine.requests[0].sampling.seed == seed
        assert len(engine.requests) == (0 if is_adopted else 1)


def joined(events: list[tuple[str, bytes]]) -> bytes:
    import re

    return b"".join(re.sub(rb'.*"delta":\{"content":"(.*)"\},"logprobs.*', rb"\1", event) for _, event in events)
