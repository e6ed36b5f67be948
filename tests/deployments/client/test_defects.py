"""A defect in any step of a delivery reaches the reader as an error at once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from deployments.client import failover
from deployments.client.attempt import Attempt, DispatchContext
from deployments.client.failover import Failover, HedgeBudget
from deployments.client.journal import Journal
from deployments.client.protocol import DeliveryFailed, Unavailable
from deployments.client.remote_engines import RemoteEngines
from deployments.client.stream import Stream
from deployments.client.timeline import ReplicaSpan
from deployments.wire.connection import WireConnection
from monitoring.metrics import Metrics
from router.fleet import Fleet
from router.placer import Placer
from tests.deployments.support.faults import Fault, Faults, When
from tests.deployments.support.in_process_engines import (
    TIMINGS,
    ChosenPlacer,
    ClientAndEngines,
    InProcessEngines,
    is_nothing_left,
    request,
    router_like,
    until,
)
from tests.deployments.support.time_limit import run_scenario

PATIENT = replace(TIMINGS, accept_s=600)
"""A defect that only a time limit reveals hangs the test."""
NUM_TOKENS = 12

CALLED = [
    (HedgeBudget, "earn"),
    (Failover, "_next _recover"),
    (Attempt, "_send"),
    (DispatchContext, "explain"),
    (Journal, "resumed is_next record"),
    (Stream, "placed accept begin feed explain"),
    (ReplicaSpan, "feed"),
    (Fleet, "open book dispatch_number record_call"),
    (ChosenPlacer, "order"),
    (Placer, "settle decision"),
    (WireConnection, "generate"),
    (Metrics, "inc observe"),
]
"""What a delivery calls. Functions that give something back can only fail after they have done so."""
GIVING_BACK = [(Placer, "release"), (Fleet, "release"), (Attempt, "_abort")]


async def migrated(client: RemoteEngines, engines: InProcessEngines, request_id: str) -> Stream:
    """Return a stream, to its end, whose replica is lost after its first token: no engine goes on before that."""
    with held_after_one_token(engines) as release:
        stream = await client.generate(request(request_id, max_tokens=NUM_TOKENS))
        try:
            await anext(stream)
            placed = next(replica for replica in engines.replicas if replica.replica == stream.replica)
            placed.wire.fail_all("its engine ended")
            release()
            async for _ in stream:
                pass
            return stream
        finally:
            await stream.aclose()


@contextmanager
def held_after_one_token(engines: InProcessEngines) -> Iterator[Callable[[], None]]:
    """Yield what lets the engines go on, which also happens in the end."""

    def release() -> None:
        for runner in engines.runners:
            runner.gate.set()

    for runner in engines.runners:
        runner.free_tokens = 1
        runner.gate.clear()
    try:
        yield release
    finally:
        release()


@pytest.mark.parametrize(("when", "hedges"), [("before", False), ("after", False), ("before", True)])
def test_a_defect_in_any_step_ends_the_stream_immediately_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, when: When, hedges: bool
) -> None:
    """Each call in turn fails of all that the delivery of a stream makes which migrates once."""
    monkeypatch.setattr(failover, "HEAD_START_S", 0.01)  # each of a hundred streams waits for it
    faults = Faults(monkeypatch, when, *CALLED, *(GIVING_BACK if when == "after" else []))
    health = {"hedge_after_s": 0.001, "hedge_share": 1.0} if hedges else {}

    async def scenario() -> None:
        metrics = Metrics("m", "ingress", "ingress")
        async with ClientAndEngines(2, PATIENT, health, metrics) as (client, engines):
            await until(lambda: len(client.reachable()) == 2)
            num_calls = num_migrated = 0
            failed: set[str | None] = set()
            while None not in failed:
                await until(lambda: len(client.reachable()) == 2)
                before = asyncio.all_tasks()
                num_calls += 1
                faults.arm(num_calls)
                try:
                    async with asyncio.timeout(60):
                        stream = await migrated(client, engines, f"defect {num_calls}")
                except (DeliveryFailed, Fault):
                    assert faults.failed is not None
                else:
                    assert stream.journal.token_ids == list(range(1, NUM_TOKENS + 1)), faults.failed
                    num_migrated += len(stream.timeline.migrations)
                faults.disarm()
                failed.add(faults.failed)
                await until(lambda: is_nothing_left(client, engines))
                while not asyncio.all_tasks() <= before:
                    await asyncio.sleep(0.005)
            assert {"Stream.feed", "Journal.resumed"} <= failed
            assert num_migrated

    run_scenario(scenario())


def test_a_defect_in_one_stream_does_not_touch_another_s_tokens_of_the_same_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1, PATIENT) as (client, engines):
            engines.runners[0].gate.clear()
            doomed, sound = [await client.generate(request(name, max_tokens=50)) for name in ("doomed", "sound")]
            feed = Stream.feed

            def fail(self: Stream, *args: object) -> bool:
                if self is doomed:
                    raise Fault("feed")
                return feed(self, *args)  # type: ignore[arg-type]

            monkeypatch.setattr(Stream, "feed", fail)
            engines.runners[0].gate.set()
            assert [t async for delta in sound for t in delta.token_ids] == list(range(1, 51))
            with pytest.raises(DeliveryFailed):
                await anext(doomed)
            assert not client.wire_counts()["gaps"]
            await until(lambda: is_nothing_left(client, engines))

    run_scenario(scenario())


def test_requests_that_wait_for_an_engine_fail_immediately_when_the_ingress_stops() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1, PATIENT) as (_, engines):
            client = RemoteEngines(router_like(engines), 1, timings=PATIENT, open_link=engines.links.open)
            await client.start()
            await until(lambda: bool(client.reachable()))
            engines.fall_silent(0)
            asked = asyncio.create_task(client.generate(request("a")))
            await until(lambda: client.num_streams == 1)
            await client.aclose()
            with pytest.raises(Unavailable, match="being stopped"):
                await asked

    run_scenario(scenario())
