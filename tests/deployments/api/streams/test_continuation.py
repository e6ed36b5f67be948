"""Continuing a stream by sending its request again: who gets what, and what is refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.api import ApiService, create_app
from deployments.api.http.access import AccessControl
from deployments.client.protocol import TakenOver
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from engine.values.stream_delta import StreamDelta
from monitoring.metrics import Metrics
from tests.deployments.api.streams.conftest import EVENTS, adoptable, events_of
from tests.deployments.support.scripted_api import Client, ScriptedEngine
from tests.support.metric_values import count_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
Events = list[tuple[str, bytes]]


def begin(client: Client, body: dict[str, Any] = HELLO, path: str = CHAT) -> Events:
    answer = client.post(path, body, headers=EVENTS)
    assert answer.status_code == 200, answer.text
    return events_of(answer.content)


def resume(client: Client, last: str, body: dict[str, Any] = HELLO, path: str = CHAT) -> httpx.Response:
    return client.post(path, body, headers={"last-event-id": last})


def rest(client: Client, last: str, body: dict[str, Any] = HELLO, path: str = CHAT) -> Events:
    answer = resume(client, last, body, path)
    assert answer.status_code == 200, answer.text
    return events_of(answer.content)


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# --- which streams -----------------------------------------------------------------------------------------


def test_a_stream_has_ids_only_if_its_client_names_the_type_of_events(client: Client) -> None:
    assert b"id: " not in client.post(CHAT, HELLO).content
    assert b"id: " not in client.post(CHAT, HELLO, headers={"accept": "application/json, */*"}).content
    several = client.post(CHAT, HELLO, headers={"accept": "application/json, Text/Event-Stream;q=0.5"})
    ids = [id for id, _ in events_of(several.content)]
    assert len(set(ids)) == len(ids) > 10


@pytest.mark.parametrize("change", [{"echo": True, "max_tokens": 0}, {"echo": True, "logprobs": 1}])
def test_an_answer_that_repeats_its_prompt_only_or_scores_it_has_no_ids(
    client: Client, engine: ScriptedEngine, change: dict[str, Any]
) -> None:
    body = {"model": "demo", "prompt": "Once", "stream": True} | change
    assert b"id: " not in client.post(COMPLETIONS, body, headers=EVENTS).content
    assert all(request.stream is None for request in engine.requests)


def test_engines_are_told_the_stream_with_its_request(client: Client, engine: ScriptedEngine) -> None:
    headers = EVENTS | {"x-raydix-detached-s": "2.5", "x-session-id": "s", "authorization": "Bearer secret"}
    answer = client.post(CHAT, HELLO | {"n": 2}, headers=headers)
    first, second = (request.stream for request in engine.requests)
    assert first is not None and second is not None
    assert (first.index, first.tenant, first.detached_s) == (0, "anonymous", 2.5)
    assert (second.index, second.record, second.name) == (1, first.record, first.name)
    assert events_of(answer.content)[0][0].startswith(f"{first.name}:")
    assert b"secret" not in first.record and json.dumps(HELLO["messages"]).encode()[:9] in first.record


@pytest.mark.parametrize("given", ["-1", "601", "nan", "soon", "inf"])
def test_a_time_without_a_reader_is_bounded(client: Client, given: str) -> None:
    answer = client.post(CHAT, HELLO, headers=EVENTS | {"x-raydix-detached-s": given})
    assert answer.status_code == 400 and "streams.max_detached_s" in answer.text


# --- continuing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_stream_is_continued_after_every_event(
    client: Client, engine: ScriptedEngine, metrics: Metrics, chunk: int, is_adopted: bool
) -> None:
    engine.chunk = chunk
    whole = begin(client)
    seed = engine.requests[0].sampling.seed
    for at, (last, _) in enumerate(whole, 1):
        engine.requests.clear()
        if is_adopted:
            adoptable(engine, last)
        found = rest(client, last)
        assert len(found) == len(whole) - at and found[-1:] == whole[at:][-1:]
        assert (found == whole[at:]) or chunk > 1
        assert [request.sampling.seed for request in engine.requests] == ([] if is_adopted else [seed])
    outcome = "adopted" if is_adopted else "regenerated"
    counted = count_of(metrics, "stream_resumptions_total", outcome=outcome)
    assert counted == len(whole)


def test_a_seed_of_the_request_is_used(client: Client, engine: ScriptedEngine) -> None:
    begin(client, HELLO | {"seed": 7})
    begin(client)
    begin(client)
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[0] == 7 and len(set(seeds)) == 3


@pytest.mark.parametrize("change", [{"n": 3}, {"n": 3, "logprobs": True}, {"n": 2, "stop": ["fox"]}])
def test_every_choice_is_continued(client: Client, engine: ScriptedEngine, change: dict[str, Any]) -> None:
    body = HELLO | change
    whole = begin(client, body)
    for at, (last, _) in enumerate(whole, 1):
        parts = adoptable(engine, last, 2 + at % 2)  # sometimes one of three is lost
        again = rest(client, last, body)
        assert by_choice([*whole[:at], *again]) == by_choice(whole)
        del engine.found[parts]


def by_choice(events: Events) -> dict[int | None, list[bytes]]:
    found: dict[int | None, list[bytes]] = defaultdict(list)
    for _, event in events:
        data = event.removeprefix(b"data: ")
        choices = [] if data == b"[DONE]" else json.loads(data)["choices"]
        found[choices[0]["index"] if choices else None].append(event)
    return found


def test_tokens_that_came_with_a_failure_are_sent_before_it(client: Client, engine: ScriptedEngine) -> None:
    ids = engine.codec.encode("The quick brown fox", add_special_tokens=False)
    failure = StreamDelta("", ids, finish_reason="abort")
    engine.fail_after = (0, failure)
    answer = client.post(CHAT, HELLO, headers=EVENTS)
    sent, _, error = answer.content.removesuffix(b"\n\n").rpartition(b"\n\n")
    assert b"The quick brown fox" in sent and b'"aborted"' in error and not error.startswith(b"id:")
    assert b"[DONE]" not in answer.content
    last = events_of(sent + b"\n\n")[-1][0]
    adoptable(engine, last, num_tokens=len(ids), finish_reason="abort")
    again = resume(client, last)
    assert (
        again.status_code == 200 and again.content.partition(b"request_id")[0] == error.partition(b"request_id")[0]
    )
    adoptable(engine, last, num_tokens=len(ids) - 1, finish_reason="abort")
    engine.fail_after = None
    assert rest(client, last)[-1][1] == b"data: [DONE]"  # generated again


def test_log_probabilities_that_a_lost_replica_had_are_generated_again(
    client: Client, engine: ScriptedEngine
) -> None:
    for change in ({}, {"logprobs": True}):
        body = HELLO | change
        last = begin(client, body)[3][0]
        engine.requests.clear()
        adoptable(engine, last, output_ids=b"\1\0\0\0")
        rest(client, last, body)
        assert len(engine.requests) == len(change)


# --- refusals ----------------------------------------------------------------------------------------------


def test_positions_that_no_stream_has_sent_are_refused(client: Client, metrics: Metrics) -> None:
    last = begin(client)[4][0]
    name, created, counts, at, check = last.split(":")
    number = int(counts)
    wrong = [
        "7", "x" * 999, last + "0", last.replace("chatcmpl", "cmpl"),
        f"{name}:{created}:{counts}.1:{at}:{check}", f"{name}:{created}::{at}:{check}",
        f"{name}:{created}:{counts}:0.{number + 1}.1:{check}", f"{name}:{created}:{counts}:2.0.1:{check}",
        f"{name}:{created}:{counts}:0.1.0:{check}", f"{name}:{created}:{counts}:1.1.1:{check}",
    ]  # fmt: skip
    for id in wrong:
        assert refusal(resume(client, id)) == (400, "invalid_last_event_id"), id
    assert refusal(resume(client, last, HELLO | {"stream": False})) == (400, "invalid_last_event_id")
    assert refusal(resume(client, last, HELLO | {"n": 2})) == (400, "invalid_last_event_id")
    assert count_of(metrics, "stream_resumptions_total", outcome="refused") == len(wrong) + 2


def test_another_prompt_and_another_text_are_refused(client: Client, engine: ScriptedEngine) -> None:
    last = begin(client)[4][0]
    other = HELLO | {"messages": [{"role": "user", "content": "Ho"}]}
    assert refusal(resume(client, last, other)) == (409, "stream_differs")
    engine.says = "Something else was said here."
    assert refusal(resume(client, last)) == (409, "stream_differs")
    adoptable(engine, last)
    assert refusal(resume(client, last)) == (409, "stream_differs")
    engine.says = "No"
    assert refusal(resume(client, last)) == (400, "ahead_of_stream")


def test_a_stream_that_was_begun_too_long_ago_is_refused(client: Client, engine: ScriptedEngine) -> None:
    name, _, *others = begin(client)[4][0].split(":")
    for created in (int(time.time()) - 3700, int(time.time()) + 100):
        last = ":".join([name, f"{created:x}", *others])
        assert refusal(resume(client, last)) == (404, "stream_expired")
        adoptable(engine, last)
        assert resume(client, last).status_code == 200
        engine.found.clear()


# --- tenants -----------------------------------------------------------------------------------------------


@pytest.fixture
def tenants(service: ApiService) -> Client:
    limits: dict[str, Any] = {"a": {"requests_per_minute": 3.0, "tokens_per_minute": 200.0}, "b": {}}
    settings = [TenantSettings(name=name, key_hashes=(hash_key(name),), **limits[name]) for name in limits]
    access = AccessControl(KeyRing(settings), clock=lambda: 0.0)
    return Client(httpx.ASGITransport(create_app(replace(service, access=access))))


def asked(client: Client, key: str, **headers: str) -> httpx.Response:
    return client.post(CHAT, HELLO, headers={"authorization": f"Bearer {key}", **EVENTS, **headers})


def test_a_stream_of_another_tenant_is_not_found(tenants: Client, engine: ScriptedEngine) -> None:
    last = events_of(asked(tenants, "a").content)[4][0]
    adoptable(engine, last, tenant="a")
    assert refusal(asked(tenants, "b", **{"last-event-id": last})) == (409, "stream_differs")
    assert not engine.adopted
    assert asked(tenants, "a", **{"last-event-id": last}).status_code == 200
    assert len(engine.adopted) == 1


def test_only_what_is_generated_again_is_charged(tenants: Client, engine: ScriptedEngine) -> None:
    begun = asked(tenants, "a")
    last = events_of(begun.content)[4][0]
    adoptable(engine, last, tenant="a")
    for _ in range(5):
        adopted = asked(tenants, "a", **{"last-event-id": last})
        assert adopted.headers["x-ratelimit-remaining-requests"] == "2"
        num_new = sum(b'"content":"' in event for _, event in events_of(adopted.content))
        assert num_new > 3
    engine.found.clear()
    again = asked(tenants, "a", **{"last-event-id": last})
    assert again.headers["x-ratelimit-remaining-requests"] == "1"
    assert int(again.headers["x-ratelimit-remaining-tokens"]) < int(
        adopted.headers["x-ratelimit-remaining-tokens"]
    )


# --- readers that leave ------------------------------------------------------------------------------------


async def left(service: ApiService, headers: dict[str, str], *, by_server: bool = False) -> bytes:
    """Read the first events of a chat, then leave, or have the server stop."""
    sent, begun = bytearray(), asyncio.Event()
    inbox = [{"type": "http.request", "body": json.dumps(HELLO).encode()}]

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        await (asyncio.Event() if by_server else begun).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.extend(message.get("body", b""))
        if sent.count(b"\n\n") > 3:
            begun.set()

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": CHAT,
        "raw_path": CHAT.encode(), "query_string": b"", "root_path": "", "scheme": "http", "server": ("t", 80),
        "client": ("test", 1), "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    task = asyncio.ensure_future(create_app(service)(scope, receive, send))
    if by_server:
        await begun.wait()
        task.cancel()
    await asyncio.wait([task])
    return bytes(sent)


@pytest.mark.parametrize("by_server", [False, True])
def test_a_stream_outlives_its_reader(service: ApiService, engine: ScriptedEngine, by_server: bool) -> None:
    engine.hangs = True
    last = events_of(asyncio.run(left(service, EVENTS, by_server=by_server)))[-1][0]
    asyncio.run(left(service, {}, by_server=by_server))
    asyncio.run(left(service, {"last-event-id": last}, by_server=by_server))
    assert [(it.detached, it.closed) for it in engine.generations] == [(True, False), (False, True), (True, False)]


def test_a_reader_from_whom_another_takes_over_gets_an_error(client: Client, engine: ScriptedEngine) -> None:
    engine.fail_after = (3, TakenOver())
    answer = client.post(CHAT, HELLO | {"n": 2}, headers=EVENTS)
    error = json.loads(answer.content.strip().rpartition(b"data: ")[2])["error"]
    assert (error["code"], error["message"]) == ("taken_over", "Another reader continues this stream.")
    assert [(it.detached, it.closed) for it in engine.generations] == [(True, False)] * 2
