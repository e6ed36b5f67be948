"""Streams survive: engines killed, stopped, and lost with their whole node, under streams of all kinds."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.chaos_app import App, Size
from benchmarks.chaos_load import Answer, Ask, Outcome, make_asks, prepare, put
from tests.e2e.conftest import PATIENCE_S, ROOT, Service

pytestmark = pytest.mark.e2e

NUM_STREAMS = 32
LONG = (150, 220)
"""Tokens of a stream: long enough for all to have begun before the first has ended."""

Known = list[tuple[Ask, Answer]]


@pytest.fixture(scope="module")
def app(service: Service) -> Iterator[App]:
    """The session's application, as what breaks others sees it."""
    found = App(service.url, "raydix", Size(replicas=2))
    yield found
    found.close()


@pytest.fixture(scope="module")
def known(app: App) -> Known:
    """Streams of all kinds, and what they answer undisturbed."""

    async def undisturbed() -> Known:
        async with connected(app) as client:
            assert await app.until(app.is_whole, PATIENCE_S), await app.health()
            return await prepare(client, make_asks(NUM_STREAMS, seed=1, tokens=LONG), at_once=8)

    return asyncio.run(undisturbed())


def connected(app: App) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=app.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None))


async def check_answers(app: App, known: Known, disturb: Callable[[], Awaitable[None]]) -> None:
    """Ask all at once, `disturb` when every stream has begun and none has ended: all answer as undisturbed."""
    async with connected(app) as client:
        outcomes = [Outcome(ask) for ask, _ in known]
        tasks = [asyncio.create_task(put(client, outcome.ask, outcome)) for outcome in outcomes]
        streams = [outcome for outcome in outcomes if outcome.ask.is_streamed]
        assert await app.until(lambda: all(len(stream.chunks) > 3 for stream in streams), PATIENCE_S)
        assert any(stream.ended is None for stream in streams)
        await disturb()
        await asyncio.gather(*tasks)
    for outcome, (_, answer) in zip(outcomes, known, strict=True):
        assert (outcome.error, outcome.answer) == (None, answer), outcome.ask.name


async def check_recovery(app: App) -> None:
    """All replicas are there again, and no page is held."""

    async def is_quiet() -> bool:
        return await app.is_whole() and await app.metric("raydix_kv_pages", state="active") == 0

    assert await app.until(is_quiet, PATIENCE_S), await app.health()


def test_streams_go_on_whatever_is_lost(tmp_path: Path) -> None:
    """Each of these once, on three Ray nodes and with two ingresses; an engine that stays silent is below."""
    faults = ["kill", "pause", "ingress", "cut", "node"]
    path = tmp_path / "report.json"
    size = ["--nodes", "3", "--replicas", "2", "--ingresses", "2", "--streams", "16", "--asks", "16"]
    each = ["--faults", ",".join(faults), "--seconds", "0", "--least", str(len(faults)), "--seed", "1"]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", *size, *each, "--json", str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    report: dict[str, Any] = json.loads(path.read_text())
    assert {fault["kind"] for fault in report["faults"]} | report["not_possible"].keys() == set(faults)
    assert report["not_possible"].keys() <= {"cut"}  # not every kernel lets one


def test_streams_go_on_when_their_replica_is_killed_which_is_replaced(
    service: Service, app: App, known: Known
) -> None:
    """Meanwhile the service is degraded, and answers."""
    before, names, victim = num_resumed(service), set(service.replicas()), app.engines()[0]

    async def is_degraded() -> bool:
        return bool((await app.health())["status"] == "degraded")

    async def kill_one() -> None:
        app.send(victim, signal.SIGKILL)
        assert await app.until(is_degraded, PATIENCE_S), await app.health()

    async def scenario() -> None:
        await check_answers(app, known, kill_one)
        await check_recovery(app)

    asyncio.run(scenario())
    assert len(set(service.replicas()) - names) == 1
    assert len(app.engines()) == 2 and victim not in app.engines()
    check_counts(service, lambda: num_resumed(service) > before)


def test_streams_go_on_when_their_replica_says_nothing_for_long(service: Service, app: App, known: Known) -> None:
    """Stopped, its connections stay open: only silence tells. What it says later is no longer waited for."""
    before, stopped = num_resumed(service, reason="silent"), app.engines()[0]

    async def stop_one() -> None:
        app.send(stopped, signal.SIGSTOP)

    async def scenario() -> None:
        try:
            await check_answers(app, known, stop_one)
        finally:
            app.send(stopped, signal.SIGCONT)
        await check_recovery(app)

    asyncio.run(scenario())
    check_counts(service, lambda: num_resumed(service, reason="silent") > before)


def num_resumed(service: Service, **labels: str) -> float:
    return service.metric("raydix_migrations_total", outcome="resumed", **labels)


def check_counts(service: Service, have_risen: Callable[[], bool]) -> None:
    """Streams that moved are counted, each with the gap that its client saw, and none was given up."""

    def have_gaps() -> bool:
        return service.metric("raydix_migration_gap_seconds_count") == num_resumed(service)

    service.wait_until(lambda: have_risen() and have_gaps())
    for outcome in ("gave_up", "no_replica"):
        assert service.metric("raydix_migrations_total", outcome=outcome) == 0
