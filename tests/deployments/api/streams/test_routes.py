"""Streams by their names: continued without their requests, and ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.api import ApiService, create_app
from deployments.api.http.access import AccessControl
from deployments.config.settings import StreamSettings
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from tests.deployments.api.streams.conftest import EVENTS, adoptable, events_of
from tests.deployments.support.scripted_api import Client, ScriptedEngine

HELLO: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": HELLO | {"n": 2},
    "/v1/completions": {"model": "demo", "prompt": "Hi", "stream": True, "max_tokens": 40},
    "/v1/messages": HELLO | {"max_tokens": 40},
    "/v1/responses": {"model": "demo", "input": "Hi", "stream": True, "store": False},
}


def begun(
    client: Client, engine: ScriptedEngine, path: str, **headers: str
) -> tuple[str, list[tuple[str, bytes]]]:
    """Begin a stream that replicas keep; return its name and its events."""
    engine.requests.clear()
    answer = client.post(path, ASKS[path], headers=EVENTS | headers)
    assert answer.status_code == 200, answer.text
    events, stream = events_of(answer.content), engine.requests[0].stream
    assert stream is not None
    name = adoptable(engine, events[0][0], len(engine.requests), record=stream.record, tenant=stream.tenant)
    return name, events


@pytest.mark.parametrize("path", ASKS)
def test_a_stream_is_continued_by_its_name(client: Client, engine: ScriptedEngine, path: str) -> None:
    name, whole = begun(client, engine, path, **{"x-session-id": "s"})
    num_asked = len(engine.requests)
    again = client.get(f"/v1/streams/{name}")
    assert again.headers.get_list("x-request-id") == [again.headers["x-request-id"]]
    assert again.headers["content-type"].startswith("text/event-stream")
    num_events = len(whole)
    assert len(events_of(again.content)) == num_events
    for at, (last, _) in enumerate(whole, 1):
        rest = client.get(f"/v1/streams/{name}", headers={"last-event-id": last})
        assert rest.status_code == 200
        assert len(events_of(rest.content)) == num_events - at
    assert len(engine.requests) == num_asked  # all were adopted
    engine.found[name] = replace(engine.found[name], parts={0: engine.found[name].parts[0]})
    client.get(f"/v1/streams/{name}")
    assert [request.session_id for request in engine.requests[num_asked:]] == ["s"] * (num_asked - 1)


@pytest.mark.parametrize("path", ASKS)
def test_all_streams_have_ids_if_the_settings_say_so(
    service: ApiService, engine: ScriptedEngine, path: str
) -> None:
    always = replace(service, streams=StreamSettings(ids="always"))
    client = Client(httpx.ASGITransport(create_app(always)))
    assert events_of(client.post(path, ASKS[path]).content)
    assert all(request.stream is not None and request.stream.record for request in engine.requests)
    assert client.post(path, ASKS[path] | {"stream": False}).status_code == 200


def test_a_stream_that_no_replica_has_is_a_404(client: Client, engine: ScriptedEngine) -> None:
    name, whole = begun(client, engine, "/v1/completions")
    engine.found.clear()
    for method in ("GET", "DELETE"):
        answer = client.request(method, f"/v1/streams/{name}", headers={"last-event-id": whole[0][0]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_not_found")


def test_a_position_of_another_stream_is_refused(client: Client, engine: ScriptedEngine) -> None:
    name, _ = begun(client, engine, "/v1/completions")
    other = begun(client, engine, "/v1/completions")[1][0][0]
    for last in (other, "7"):
        answer = client.get(f"/v1/streams/{name}", headers={"last-event-id": last})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_last_event_id")


def test_a_large_request_is_not_kept_and_has_to_be_sent_again(service: ApiService, engine: ScriptedEngine) -> None:
    small = replace(service, streams=StreamSettings(max_record_bytes=50))
    client = Client(httpx.ASGITransport(create_app(small)))
    name, whole = begun(client, engine, "/v1/completions")
    answer = client.get(f"/v1/streams/{name}", headers={"last-event-id": whole[2][0]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "request_not_kept")
    body, last = ASKS["/v1/completions"], whole[2][0]
    again = client.post("/v1/completions", body, headers={"last-event-id": last})
    assert events_of(again.content) == whole[3:]


def test_a_stream_is_ended_by_its_name(client: Client, engine: ScriptedEngine) -> None:
    name, _ = begun(client, engine, "/v1/chat/completions")
    engine.generations.clear()
    answer = client.request("DELETE", f"/v1/streams/{name}")
    assert answer.json() == {"id": name, "object": "stream", "deleted": True}
    assert [it.closed for it in engine.generations] == [True, True]
    assert [found.part.index for found in engine.adopted] == [0, 1]


def test_streams_belong_to_their_tenants(service: ApiService, engine: ScriptedEngine) -> None:
    settings = [TenantSettings(name=name, key_hashes=(hash_key(name),)) for name in ("a", "b")]
    access = AccessControl(KeyRing(settings))
    client = Client(httpx.ASGITransport(create_app(replace(service, access=access))))
    name, whole = begun(client, engine, "/v1/chat/completions", authorization="Bearer a")
    for method in ("GET", "DELETE"):
        for key, status in (("b", 404), ("c", 401)):
            answer = client.request(method, f"/v1/streams/{name}", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status
    assert not engine.adopted
    own = client.get(f"/v1/streams/{name}", headers={"authorization": "Bearer a", "last-event-id": whole[-2][0]})
    assert events_of(own.content) == whole[-1:]


def test_a_reader_by_name_that_leaves_ends_nothing(service: ApiService, engine: ScriptedEngine) -> None:
    client = Client(httpx.ASGITransport(create_app(service)))
    name, _ = begun(client, engine, "/v1/completions")
    engine.hangs = True
    engine.generations.clear()
    sent, left = bytearray(), asyncio.Event()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.extend(message.get("body", b""))
        left.set()

    path = f"/v1/streams/{name}"
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "server": ("t", 80),
        "client": ("test", 1), "headers": [],
    }  # fmt: skip
    asyncio.run(asyncio.wait_for(create_app(service)(scope, receive, send), 30))
    (generation,) = engine.generations
    assert generation.detached and not generation.closed
