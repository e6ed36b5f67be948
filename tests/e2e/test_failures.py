"""Streams survive: engines killed, stopped, and lost with their whole node, under streams of all kinds."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from benchmarks.chaos_app import App, Size, arguments
from benchmarks.chaos_load import Ask, Outcome, make_asks, prepare, put
from deployments.app import build
from deployments.config import AppArgs
from tests.e2e.conftest import ROOT, Service

pytestmark = pytest.mark.e2e

NUM_STREAMS = 32
LONG = (150, 220)
"""Tokens of a stream: long enough for all to have begun before the first has ended."""


@contextmanager
def application(service: Service, name: str, size: Size, **health: Any) -> Iterator[App]:
    """A small application of its own beside the session's."""
    serve.run(build(AppArgs.model_validate(arguments(size, **health))), name=name, route_prefix=f"/{name}")
    app = App(f"{service.url}/{name}", name, size)
    try:
        yield app
    finally:
        app.close()
        serve.delete(name)


@pytest.fixture(scope="module")
def two_engines(service: Service) -> Iterator[App]:
    with application(service, "failing", Size(replicas=2)) as app:
        yield app


def scenario(app: App, asks: list[Ask], disturb: Callable[[], None], is_whole_after: bool = True) -> list[Outcome]:
    """Ask all at once, `disturb` when every stream has begun and none has ended; how they ended.

    Those that have an answer have the undisturbed one, to the last token.
    """

    async def run() -> list[Outcome]:
        async with httpx.AsyncClient(
            base_url=app.url, timeout=120, limits=httpx.Limits(max_connections=None)
        ) as client:
            assert await app.until(app.is_whole, 90), await app.health()
            known = await prepare(client, asks, NUM_STREAMS)
            outcomes = [Outcome(ask) for ask, _ in known]
            tasks = [asyncio.create_task(put(client, outcome.ask, outcome)) for outcome in outcomes]
            streams = [outcome for outcome in outcomes if outcome.ask.is_streamed]
            assert await app.until(lambda: all(len(stream.chunks) > 3 for stream in streams), 60)
            assert any(stream.ended is None for stream in streams)
            disturb()
            await asyncio.gather(*tasks)
            for outcome, (_, answer) in zip(outcomes, known, strict=True):
                assert outcome.answer in (None, answer), outcome.ask.name
            if is_whole_after:
                await check_recovery(app)
        return outcomes

    return asyncio.run(run())


async def check_recovery(app: App) -> None:
    """All replicas are there again, and no page is held."""

    async def is_quiet() -> bool:
        return await app.is_whole() and await app.metric("raydix_kv_pages", state="active") == 0

    assert await app.until(is_quiet, 90), await app.health()


async def count(app: App, name: str, **labels: str) -> int:
    """A metric, once processes have reported: they do so every second."""
    await asyncio.sleep(2.5)
    return int(await app.metric(name, **labels))


def test_streams_go_on_when_a_whole_node_is_lost(tmp_path: Path) -> None:
    """Engines on several Ray nodes, one of which is removed under streams."""
    report = chaos(
        tmp_path, "--nodes", "3", "--replicas", "2", "--faults", "node", "--seconds", "5", "--least", "1"
    )
    assert [fault["kind"] for fault in report["faults"]] == ["node"]


def test_half_a_minute_of_chaos(tmp_path: Path) -> None:
    """Each of these once at least, on two ingresses, whatever the machine's speed; a stopped engine is below."""
    faults = ["kill", "pause", "ingress", "cut"]
    options = ["--seconds", "30", "--least", "4", "--seed", "1", "--faults", ",".join(faults)]
    report = chaos(tmp_path, "--replicas", "3", "--ingresses", "2", *options)
    assert {fault["kind"] for fault in report["faults"]} | report["not_possible"].keys() == set(faults)
    assert report["not_possible"].keys() <= {"cut"}  # not every kernel lets one


def test_streams_go_on_when_their_replica_is_killed(two_engines: App) -> None:
    app = two_engines
    outcomes = scenario(app, make_asks(NUM_STREAMS, seed=1, tokens=LONG), lambda: kill_one(app))
    assert [outcome.error for outcome in outcomes] == [None] * NUM_STREAMS
    resumed = asyncio.run(count(app, "raydix_migrations_total", outcome="resumed"))
    assert resumed > 0
    assert asyncio.run(count(app, "raydix_migration_gap_seconds_count")) == resumed
    for outcome in ("gave_up", "no_replica"):
        assert asyncio.run(count(app, "raydix_migrations_total", outcome=outcome)) == 0


def test_streams_go_on_when_their_replica_says_nothing_any_more(two_engines: App) -> None:
    """Stopped, its connections stay open: only silence tells. Serve replaces it in the end."""
    app = two_engines
    before = asyncio.run(count(app, "raydix_migrations_total", reason="silent", outcome="resumed"))
    stopped = []

    def stop_one() -> None:
        stopped.append(app.engines()[0])
        app.send(stopped[0], signal.SIGSTOP)

    outcomes = scenario(app, make_asks(NUM_STREAMS, seed=2, tokens=LONG), stop_one, is_whole_after=False)
    assert [outcome.error for outcome in outcomes] == [None] * NUM_STREAMS
    assert asyncio.run(count(app, "raydix_migrations_total", reason="silent", outcome="resumed")) > before
    asyncio.run(app.until(lambda: stopped[0] not in app.engines(), timeout=15))
    app.send(stopped[0], signal.SIGKILL)
    asyncio.run(check_recovery(app))


@pytest.mark.parametrize(
    ("health", "outcome"), [({"max_migrations": 0}, "gave_up"), ({"migration_wait_s": 0.3}, "no_replica")]
)
def test_a_stream_that_cannot_go_on_ends_with_an_error(
    service: Service, health: dict[str, Any], outcome: str
) -> None:
    """Its tries are used up, or the only replica is gone: the client gets an error object in its stream."""
    asks = [ask for ask in make_asks(24, seed=3, tokens=LONG) if "completion with" in ask.name]
    with application(service, outcome.replace("_", "-"), Size(replicas=1), **health) as app:
        outcomes = scenario(app, asks, lambda: kill_one(app), is_whole_after=False)
        broken = [outcome for outcome in outcomes if outcome.answer is None]
        assert broken
        assert not any(outcome.is_broken_off for outcome in broken)
        assert all("lost" in str(outcome.error) for outcome in broken), broken[0].error
        assert asyncio.run(count(app, "raydix_migrations_total", outcome=outcome)) == len(broken)


def kill_one(app: App) -> None:
    app.send(app.engines()[0], signal.SIGKILL)


def chaos(directory: Path, *options: str) -> dict[str, Any]:
    """Run the benchmark in a Ray of its own; its report, in which nothing is amiss."""
    path = directory / "report.json"
    command = [sys.executable, "-m", "benchmarks.chaos", *options, "--streams", "16", "--asks", "16"]
    run = subprocess.run(
        [*command, "--json", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    report: dict[str, Any] = json.loads(path.read_text())
    return report
