"""Streams of all kinds survive engines that are killed or stopped, and connections that break."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.chaos_app import App, Size
from benchmarks.chaos_faults import NotPossible, cut_between
from benchmarks.chaos_load import COMPLETIONS, Answer, Ask, Outcome, make_asks, prepare, put
from tests.e2e.conftest import Service
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e

NUM_STREAMS = 24
LONG = (150, 220)
"""Tokens of a stream with a known answer."""
MAX_READERS = 32

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
    """Ask all at once, and `disturb` when every stream has begun: all answer as undisturbed."""
    async with connected(app) as client:
        outcomes = [Outcome(ask) for ask, _ in known]
        tasks = [asyncio.create_task(put(client, outcome.ask, outcome)) for outcome in outcomes]
        streams = [outcome for outcome in outcomes if outcome.ask.is_streamed]
        async with all_occupied(app, client):
            assert await app.until(lambda: all(len(stream.chunks) > 3 for stream in streams), PATIENCE_S)
            await disturb()
        await asyncio.gather(*tasks)
    for outcome, (_, answer) in zip(outcomes, known, strict=True):
        assert (outcome.error, outcome.answer) == (None, answer), outcome.ask.name


@contextlib.asynccontextmanager
async def moving_streams(app: App, **labels: str) -> AsyncIterator[None]:
    """What is done here has some streams resumed at another replica, for which this waits."""
    before = await num_resumed(app, **labels)

    async def have_moved() -> bool:
        return await num_resumed(app, **labels) > before

    yield
    assert await app.until(have_moved, PATIENCE_S), await app.samples("raydix_migrations_total")


@contextlib.asynccontextmanager
async def all_occupied(app: App, client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Each replica has a stream all the time: on a fast machine those with known answers may all have ended on
    the one that is lost.
    """
    replicas: set[str] = set()

    async def read(number: int) -> None:
        body = {
            "model": "demo",
            "prompt": f"{number} and on",
            "max_tokens": 3000,
            "ignore_eos": True,
            "stream": True,
        }
        while True:
            async with client.stream("POST", COMPLETIONS, json=body) as response:
                replicas.add(response.headers["x-raydix-replica"])
                async for line in response.aiter_lines():
                    assert not line.startswith('data: {"error"'), line

    readers: list[asyncio.Task[None]] = []
    try:
        while len(replicas) < app.size.replicas:
            readers.append(asyncio.create_task(read(len(readers))))
            await asyncio.wait(readers, timeout=0.3)
            assert len(readers) < MAX_READERS, f"all are on {replicas}"
        yield
        assert not [reader for reader in readers if reader.done()]
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def check_recovery(app: App) -> None:
    """All replicas are there again, and no page is held."""

    async def is_quiet() -> bool:
        return await app.is_whole() and await app.metric("raydix_kv_pages", state="active") == 0

    assert await app.until(is_quiet, PATIENCE_S), await app.health()


def test_streams_continue_when_their_connection_breaks_again_and_again(app: App, known: Known) -> None:
    async def cut() -> None:
        try:
            assert await cut_between(app.ingresses()[0], app.engines()[0], 0.5)
        except NotPossible as reason:
            pytest.skip(str(reason))

    async def scenario() -> None:
        await check_answers(app, known, cut)
        await check_recovery(app)

    asyncio.run(scenario())


def test_streams_continue_when_their_replica_is_killed_and_replaced(
    service: Service, app: App, known: Known
) -> None:
    """The service is degraded meanwhile, and answers."""
    names, victim = set(service.replicas()), app.engines()[0]

    async def is_degraded() -> bool:
        return bool((await app.health())["status"] == "degraded")

    async def kill_one() -> None:
        async with moving_streams(app):
            app.send(victim, signal.SIGKILL)
            assert await app.until(is_degraded, PATIENCE_S), await app.health()

    async def scenario() -> None:
        await check_answers(app, known, kill_one)
        await check_recovery(app)

    asyncio.run(scenario())
    assert len(set(service.replicas()) - names) == 1
    assert len(app.engines()) == 2 and victim not in app.engines()
    check_counts(service)


def test_streams_continue_when_their_replica_is_silent_for_long(service: Service, app: App, known: Known) -> None:
    """Stopped, its connections stay open: only silence tells. What it says later is no longer waited for."""
    stopped = app.engines()[0]

    async def stop_one() -> None:
        async with moving_streams(app, reason="silent"):
            app.send(stopped, signal.SIGSTOP)

    async def scenario() -> None:
        try:
            await check_answers(app, known, stop_one)
        finally:
            app.send(stopped, signal.SIGCONT)
        await check_recovery(app)

    asyncio.run(scenario())
    check_counts(service)


def test_an_engine_that_gets_no_memory_is_left_and_replaced(service: Service, app: App) -> None:
    """Its steps fail at once, and still it is not taken for idle: everybody gets an answer."""
    victim, body = app.engines()[0], {"model": "demo", "max_tokens": 4, "ignore_eos": True}

    async def scenario() -> None:
        size = psutil.Process(victim).memory_info().vms
        resource.prlimit(victim, resource.RLIMIT_AS, (size, size))
        async with connected(app) as client, asyncio.timeout(PATIENCE_S):
            number = 0
            while victim in app.engines():
                prompts = [f"{number + at}, " * 400 for at in range(8)]
                number += len(prompts)
                asked = (client.post(COMPLETIONS, json={**body, "prompt": prompt}) for prompt in prompts)
                answers = await asyncio.gather(*asked)
                assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
        await check_recovery(app)

    asyncio.run(scenario())
    check_counts(service)


def test_an_ingress_that_could_not_begin_to_serve_is_replaced_by_the_next_controller(
    service: Service, app: App
) -> None:
    """The controller that started it is gone before it hears of the failure."""

    async def fails_to_begin(logs: set[Path]) -> bool:
        """Stop the controller while a new ingress starts; whether the start fails before it has answered."""

        def new_log() -> str:
            return "".join(log.read_text() for log in ingress_logs() - logs)

        assert await app.until(
            lambda: "updated replicas for Deployment(name='EngineReplica'" in new_log(), PATIENCE_S
        )
        app.send(app.controllers()[0], signal.SIGSTOP)
        assert await app.until(
            lambda: "cannot begin to serve" in new_log() or "the API is at" in new_log(), PATIENCE_S
        )
        return "cannot begin to serve" in new_log()

    async def scenario() -> None:
        for _ in range(10):
            logs, controller = ingress_logs(), app.controllers()[0]
            app.send(app.ingresses()[0], signal.SIGKILL)
            if await fails_to_begin(logs):
                break
            app.send(controller, signal.SIGCONT)
            assert await app.until(app.is_whole, PATIENCE_S)
        else:
            pytest.fail("each new ingress served before its controller was stopped")
        deaf = app.ingresses()
        app.send(controller, signal.SIGKILL)
        await check_recovery(app)
        assert not set(deaf) & set(app.ingresses())

    asyncio.run(scenario())


def ingress_logs() -> set[Path]:
    """The logs of all ingresses that Serve has started for the session's application."""
    import ray

    node = ray._private.worker.global_worker.node
    return set(Path(node.get_logs_dir_path(), "serve").glob("replica_raydix_Ingress_*.log"))


async def num_resumed(app: App, **labels: str) -> float:
    return await app.metric("raydix_migrations_total", outcome="resumed", **labels)


def check_counts(service: Service) -> None:
    """Each stream that moved is counted with the gap that its client saw, and none was given up."""

    def have_gaps() -> bool:
        resumed = service.metric("raydix_migrations_total", outcome="resumed")
        return service.metric("raydix_migration_gap_seconds_count") == resumed

    service.wait_until(have_gaps)
    for outcome in ("gave_up", "no_replica"):
        assert service.metric("raydix_migrations_total", outcome=outcome) == 0
