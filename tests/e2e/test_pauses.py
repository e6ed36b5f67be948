"""A process that stands still for twice the longest time that its peers have costs none of them an answer."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from benchmarks.chaos_app import App, Size
from benchmarks.chaos_load import Outcome, make_asks, prepare, put
from tests.e2e.conftest import Service, running
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e

LIMIT_S = 3
"""The longest time that a client or an engine has here."""
PAUSE_S = 2 * LIMIT_S
NUM_STREAMS, NUM_CLIENTS = 8, 5
TOKENS = (150, 220)


@pytest.fixture(scope="module")
def app(service: Service) -> Iterator[App]:
    """An application with short limits, in the session's Ray."""
    arguments = {
        "engine": {"model": "demo", "kv_pages": 1024, "threads": 1},
        "engines": {"count": 2, "num_cpus": 0.1},
        "ingresses": {"count": 1, "num_cpus": 0.1, "header_timeout_s": LIMIT_S, "keep_alive_s": LIMIT_S},
        "limits": {"body_timeout_s": LIMIT_S, "idle_timeout_s": LIMIT_S, "slow_reader_timeout_s": LIMIT_S},
        "admission": {"max_wait_s": 300.0},
        "health": {"lost_after_s": 1.0, "check_period_s": 1.0, "check_timeout_s": 5.0 * PAUSE_S},
    }
    with running("paused", arguments) as paused:
        app = App(paused.url, "paused", Size(replicas=2, ingresses=1))
        yield app
        app.close()


@pytest.mark.parametrize("who", ["ingress", "engine"])
def test_no_client_is_cut_off_because_a_process_stood_still(app: App, who: str) -> None:
    """Heads, bodies and next requests that come meanwhile are answered, and streams are right, read or unread."""

    async def scenario() -> None:
        assert await app.until(app.is_whole, PATIENCE_S), await app.health()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=app.url, timeout=PATIENCE_S, limits=limits) as client:
            known = await prepare(client, make_asks(NUM_STREAMS, seed=3, tokens=TOKENS), at_once=4)
            outcomes = [Outcome(ask) for ask, _ in known]
            streams = [asyncio.create_task(put(client, outcome.ask, outcome)) for outcome in outcomes]
            streamed = [outcome for outcome in outcomes if outcome.ask.is_streamed]
            assert await app.until(lambda: all(outcome.chunks for outcome in streamed), PATIENCE_S)
            await asyncio.to_thread(pause_during_requests, app, who)
            await asyncio.gather(*streams)
        for outcome, (_, answer) in zip(outcomes, known, strict=True):
            assert (outcome.error, outcome.answer) == (None, answer), outcome.ask.name

    asyncio.run(scenario())


def pause_during_requests(app: App, who: str) -> None:
    """Pause the process while clients are in the midst of a request, and let them end it before it goes on."""
    pid = (app.ingresses() if who == "ingress" else app.engines())[0]
    short, long = request(max_tokens=2), request(max_tokens=400, stream=True, ignore_eos=True)
    begun = {"head": short[:20], "body": short[:-5], "next": short, "reader": long}
    rest = {"head": short[20:], "body": short[-5:], "next": short, "reader": b""}
    address = ("127.0.0.1", urlsplit(app.url).port or 80)
    clients = [(kind, socket.create_connection(address, PATIENCE_S)) for kind in begun for _ in range(NUM_CLIENTS)]
    for kind, client in sorted(clients, key=lambda each: each[0] != "next"):
        client.sendall(begun[kind])
        if kind == "next":
            check_answer(kind, client)
    app.send(pid, signal.SIGSTOP)
    try:
        time.sleep(PAUSE_S / 2)
        if who == "ingress":
            send_all(clients, rest)
        time.sleep(PAUSE_S / 2)
    finally:
        app.send(pid, signal.SIGCONT)
    for kind, client in clients:
        if who == "ingress" or kind == "reader":
            check_answer(kind, client)
        client.close()


def send_all(clients: list[tuple[str, socket.socket]], rest: dict[str, bytes]) -> None:
    for kind, client in clients:
        client.sendall(rest[kind])


def request(**fields: object) -> bytes:
    body = json.dumps({"model": "demo", "prompt": "Return the", **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def check_answer(kind: str, client: socket.socket) -> None:
    """Read an answer to its end."""
    ends = (b"}", b"[DONE]\n\n\r\n0\r\n\r\n", b"[DONE]\n\n0\r\n\r\n")
    told = b""
    while not told.endswith(ends) or (kind == "reader" and b"[DONE]" not in told):
        data = client.recv(2**16)
        assert data, f"the connection was ended ({kind}) after {told[-300:]!r}"
        told += data
    assert told.startswith(b"HTTP/1.1 200 OK") and b'"error":' not in told, (kind, told[-500:])
