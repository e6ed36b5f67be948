"""The judges of the siege notice what they look for, and its random requests are not all refused at the door."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
from typing import Any

import httpx
import pytest

from benchmarks.attackers import connections
from benchmarks.attackers.connections import Stranger
from benchmarks.attackers.random_requests import drawn
from benchmarks.loop_gaps import application
from benchmarks.siege import lost_its_ingress
from benchmarks.siege_answers import Answer, fault
from benchmarks.siege_app import Outage
from benchmarks.siege_streams import Ask, Broken, Reader, Wrong
from benchmarks.siege_watch import MAX_OWN_LAG_S, MAX_RSS_MIB, Seen, Watch
from deployments.api import Limits

JSON = {"content-type": "application/json"}
STREAM = {"content-type": "text/event-stream; charset=utf-8"}


def error(status: int, message: str, code: str | None = None, **headers: str) -> Answer:
    told = {"message": message, "type": "some_error", "param": None, "code": code}
    return Answer(status, {**JSON, **headers}, json.dumps({"error": told}).encode())


def anthropic(kind: str, message: str) -> bytes:
    told = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "r"}
    return json.dumps(told).encode()


def failed(code: str, message: str) -> bytes:
    """The end of a stream of Responses."""
    events = {"type": "error", "code": code, "message": message, "param": None}, {"type": "response.failed"}
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)


# --- answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, JSON, b"{}"),
        Answer(200, STREAM, b'data: {"choices": []}\n\ndata: [DONE]\n\n'),
        Answer(200, STREAM, b'data: {"error": {"message": "It was lost; ask.", "type": "a", "code": 1}}\n\n'),
        Answer(200, STREAM, b'event: message_stop\ndata: {"type": "message_stop"}\n\n'),
        Answer(
            200, STREAM, b"event: error\ndata: " + anthropic("overloaded_error", "It was lost; ask.") + b"\n\n"
        ),
        Answer(200, STREAM, b'data: {"type": "response.created"}\n\ndata: {"type": "response.incomplete"}\n\n'),
        Answer(200, STREAM, failed("engine_timeout", "The engine did not answer.")),
        Answer(400, JSON, anthropic("invalid_request_error", "max_tokens is required.")),
        Answer(500, JSON, anthropic("api_error", "2 died (health.max_lost_replicas_per_request); do not ask.")),
        Answer(200, {"content-type": "text/plain"}, b"# HELP"),
        error(400, "prompt is empty; it needs at least one token."),
        error(413, "The body is larger than 5 bytes (limits.max_body_bytes)."),
        error(429, "Rate limit reached: 5 at once (tenants[].max_concurrency).", **{"retry-after": "1"}),
        error(500, "2 engines died while they computed this.", "ends_engines"),
    ],
)
def test_proper_answers_have_no_fault(answer: Answer) -> None:
    assert fault(answer) is None


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (Answer(200, JSON, b"[]"), "no JSON object"),
        (Answer(200, JSON, b'{"a'), "no JSON object"),
        (Answer(500, JSON, b"Internal Server Error"), "no error object"),
        (Answer(400, JSON, b'{"error": {"message": "No."}}'), "no error object"),
        (error(500, "Internal error. The log has more."), "a defect"),
        (error(418, "I am a teapot, as it seems."), "a status that docs/api.md does not have"),
        (error(413, "The body is larger than 5 bytes."), "names no setting"),
        (error(413, "The body is larger than 5 bytes (limits.max_body_size)."), "names no setting"),
        (error(429, "Too much (limits.max_total_body_bytes)."), "no retry-after"),
        (error(400, "no sentence"), "the message is no sentence"),
        (Answer(200, STREAM, b""), "a stream without events"),
        (Answer(200, STREAM, b'data: {"choices": []}\n\n'), "a stream ends with"),
        (Answer(200, STREAM, b'data: {"choi\n\ndata: [DONE]\n\n'), "an event is no JSON"),
        (Answer(200, STREAM, b'data: {"error": {"message": "x", "type": "server_error", "code": null}}\n\n'),
         "a stream ends with a defect"),
        (Answer(200, STREAM, b"event: error\ndata: " + anthropic("api_error", "Internal error.") + b"\n\n"),
         "a stream ends with a defect"),
        (Answer(200, STREAM, failed("server_error", "Internal error.")), "a stream ends with a defect"),
        (Answer(200, STREAM, b'data: {}\n\ndata: {"type": "response.failed"}\n\n'), "a stream ends with"),
        (Answer(500, JSON, anthropic("api_error", "Internal error. The log has more.")), "a defect"),
        (Answer(400, JSON, b'{"type": "error", "error": {"message": "It is wrong."}}'), "no error object"),
        (Answer(302, {}, b""), "status 302"),
    ],
)  # fmt: skip
def test_each_fault_is_named(answer: Answer, what: str) -> None:
    assert (fault(answer) or "").startswith(what)


# --- streams ------------------------------------------------------------------------------------------------

ASK = Ask("an ask", "/v1/completions", {}, (5, 6, 7), "one two three")
CHUNKS = [("one", [5]), (" two", [6]), (" three", [7])]


def take(reader: Reader, data: str) -> None:
    for line in (f"data: {data}", ""):
        reader.take(line)


def read(chunks: list[tuple[str, list[int]]], num_used: int = 3, end: str = "[DONE]") -> None:
    reader = Reader(ASK)
    for text, token_ids in chunks:
        choice = {"text": text, "token_ids": token_ids, "finish_reason": None}
        take(reader, json.dumps({"choices": [choice]}))
    take(reader, json.dumps({"choices": [], "usage": {"completion_tokens": num_used}}))
    if end:
        take(reader, end)
    reader.check_end()


def test_a_stream_as_in_peace_is_right() -> None:
    read(CHUNKS)
    read([("one two three", [5, 6, 7])])
    read([("", [5]), ("one two", [6]), (" three", [7])])


@pytest.mark.parametrize(
    ("chunks", "options"),
    [
        (CHUNKS[:2], {}),
        (CHUNKS[1:], {}),
        ([*CHUNKS, CHUNKS[2]], {}),
        ([CHUNKS[0], CHUNKS[2], CHUNKS[1]], {}),
        ([*CHUNKS[:2], (" three", [8])], {}),
        ([*CHUNKS[:2], (" four", [7])], {}),
        ([*CHUNKS[:2], (" ", [7])], {}),
        (CHUNKS, {"num_used": 4}),
        (CHUNKS, {"end": '{"error": {"message": "lost"}}'}),
    ],
)
def test_a_stream_with_any_other_token_text_count_or_end_is_wrong(
    chunks: list[tuple[str, list[int]]], options: dict[str, Any]
) -> None:
    with pytest.raises(Wrong):
        read(chunks, **options)


def test_a_stream_without_an_end_mark_is_broken_off_and_one_that_continues_after_it_is_wrong() -> None:
    with pytest.raises(httpx.ReadError, match="3 of 3 tokens"):
        read(CHUNKS, end="")
    reader = Reader(ASK)
    take(reader, "[DONE]")
    with pytest.raises(Wrong, match="goes on"):
        take(reader, "{}")


@pytest.mark.parametrize(
    ("kind", "how", "began", "ended", "is_excused"),
    [
        ("ingress", "killed", 10.0, 20.0, True),
        ("ingress", "killed", 6.0, 7.0, False),
        ("ingress", "killed", 31.0, 40.0, False),
        ("engine", "killed", 10.0, 20.0, False),
        ("ingress", "stopped", 10.0, 20.0, False),
    ],
)
def test_only_the_death_of_an_ingress_excuses_a_stream_that_broke_off(
    kind: str, how: str, began: float, ended: float, is_excused: bool
) -> None:
    stream = Broken("an ask", 9.0, 30.0, "gone")
    assert lost_its_ingress(stream, [Outage(kind, how, began, ended)]) is is_excused


# --- bounds -------------------------------------------------------------------------------------------------


def test_each_new_record_beyond_a_bound_is_reported() -> None:
    watch = Watch(target=None)  # type: ignore[arg-type]  # it does not look
    for lag in (0.01, MAX_OWN_LAG_S, 2 * MAX_OWN_LAG_S, 1.5 * MAX_OWN_LAG_S):
        watch.see_own_lag("i", lag)
    for mib in (10, MAX_RSS_MIB["hub"], MAX_RSS_MIB["hub"] + 1, 20):
        watch.see_rss("hub", mib)
    assert len(watch.seen.beyond) == 2
    assert watch.seen == Seen(
        own_lag_s=2 * MAX_OWN_LAG_S, rss_mib={"hub": MAX_RSS_MIB["hub"] + 1}, beyond=watch.seen.beyond
    )


# --- random requests ----------------------------------------------------------------------------------------


def test_random_requests_reach_the_engines_and_each_kind_of_error_is_among_their_answers() -> None:
    async def scenario() -> dict[int, int]:
        draw, counts = random.Random(5), dict[int, int]()
        transport = httpx.ASGITransport(application(Limits(), context=2048))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            document = (await client.get("/openapi.json")).json()
            for _ in range(300):
                path, method, content = drawn(document, draw)
                headers = {"content-type": "application/json"}
                answer = await client.request(method, path, content=content, headers=headers)
                counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
        return counts

    counts = asyncio.run(scenario())
    assert counts[200] > 20
    assert {400, 404, 405} <= counts.keys()


def test_a_seed_makes_the_same_requests_again() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    content = {"content": {"application/json": {"schema": schema}}}
    document = {"paths": {"/a": {"post": {"requestBody": content}}, "/b": {"get": {}}}}
    drawings = [[drawn(document, draw) for _ in range(20)] for draw in (random.Random(1), random.Random(1))]
    assert drawings[0] == drawings[1]


def test_a_stranger_waits_until_the_process_that_it_attacks_is_replaced() -> None:
    async def scenario() -> None:
        with socket.socket() as killed:
            killed.bind(("127.0.0.1", 0))  # the port is taken, and nobody listens
            host, port = killed.getsockname()
            with pytest.raises(ConnectionRefusedError):
                await Stranger(host, port, is_patient=False).__aenter__()
            waiting = asyncio.create_task(Stranger(host, port).__aenter__())
            await asyncio.sleep(0.05)
            assert not waiting.done()
            killed.listen()
            await (await waiting).__aexit__()

    asyncio.run(scenario())


def test_a_client_that_never_reads_is_to_be_given_up_soon_after_its_answer_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            async with Stranger(*server.getsockname()) as stranger:
                accepted, _ = server.accept()
                monkeypatch.setattr(connections, "PATIENCE_S", 0.0)
                waiting = asyncio.create_task(stranger.until_given_up([os.getpid()]))
                await asyncio.sleep(1.5)
                assert not waiting.done()
                accepted.send(b"x")
                assert not await waiting
                accepted.close()
                assert await stranger.until_given_up([])

    asyncio.run(scenario())
