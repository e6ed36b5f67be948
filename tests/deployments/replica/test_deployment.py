"""The replica's contract with Serve: its health reflects progress, cancelling aborts, refusals are results."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from deployments.client.protocol import CallOutcome
from deployments.replica.deployment import EngineReplica
from deployments.replica.liveness import EngineUnhealthy
from deployments.replica.settings import ReplicaSettings
from deployments.wire.server import WireTimings
from engine.grammar.spec import Grammar
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from tests.deployments.support.in_process_engines import CountingRunner, InProcessEngines, request, until
from tests.deployments.support.wire_peer import ask


@pytest.fixture
def engines() -> Iterator[InProcessEngines]:
    made = InProcessEngines(1, WireTimings(absent_ingress_s=60), max_running=1, max_waiting=1)
    yield made
    made.close()


@pytest.fixture
def replica(engines: InProcessEngines) -> EngineReplica:
    return engines.replicas[0]


def ended(outcome: CallOutcome) -> str | None:
    assert outcome.output is not None
    return outcome.output.finish_reason


def test_a_handle_s_call_returns_the_whole_output(replica: EngineReplica) -> None:
    async def scenario() -> None:
        outcome = await replica.generate(request("a", 5))
        assert outcome.output is not None
        assert (outcome.replica, outcome.output.token_ids, ended(outcome)) == ("r0", [1, 2, 3, 4, 5], "length")

    asyncio.run(scenario())


def test_a_watch_lasts_until_serve_stops_the_replica_and_its_streams_have_ended(
    engines: InProcessEngines, replica: EngineReplica
) -> None:
    async def scenario() -> None:
        watch = asyncio.create_task(replica.watch(None, "i"))
        replica.wire.open(ask("a"), "i")
        await asyncio.sleep(0.2)
        assert not watch.done()
        engines.stopping.add("r0")
        await asyncio.sleep(0.2)
        assert not watch.done()
        replica.wire.forget("a")
        await asyncio.wait_for(watch, 60)

    asyncio.run(scenario())


def test_threads_of_an_engine_s_process_hand_over_the_interpreter_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python's default time, 5 ms, a thread that launches kernels could have launched a whole step."""
    intervals: list[float] = []
    monkeypatch.setattr(sys, "setswitchinterval", intervals.append)
    InProcessEngines(1).close()
    assert intervals == [0.001]


def test_an_idle_replica_is_healthy(replica: EngineReplica) -> None:
    async def scenario() -> None:
        await asyncio.sleep(0.7)  # longer than the stall timeout
        await replica.check_health()

    asyncio.run(scenario())


def test_a_stalled_engine_fails_its_health_check_while_the_event_loop_answers(
    engines: InProcessEngines, replica: EngineReplica
) -> None:
    async def scenario() -> None:
        engines.runners[0].gate.clear()
        call = asyncio.create_task(replica.generate(request("a")))
        await asyncio.sleep(0.2)
        await replica.check_health()
        await asyncio.sleep(0.6)
        with pytest.raises(EngineUnhealthy, match="no engine step"):
            await replica.check_health()
        engines.runners[0].gate.set()
        assert ended(await call) == "length"
        await replica.check_health()

    asyncio.run(scenario())


def test_a_dead_loop_fails_its_health_check_and_takes_nothing(replica: EngineReplica) -> None:
    async def scenario() -> None:
        def explode(_: float) -> Any:
            raise RuntimeError("a defect")

        replica.engine.scheduler.schedule = explode  # type: ignore[method-assign,assignment]
        call = asyncio.create_task(replica.generate(request("a")))
        await until(lambda: replica.engine.loop.failure is not None)
        with pytest.raises(EngineUnhealthy, match="RuntimeError"):
            await replica.check_health()
        assert (await replica.generate(request("b"))).refusal == "stopped"
        with pytest.raises(EngineUnhealthy, match="RuntimeError"):  # so that its stream goes on elsewhere at once
            await call

    asyncio.run(scenario())


def test_cancelling_the_call_ends_the_request(engines: InProcessEngines, replica: EngineReplica) -> None:
    async def scenario() -> None:
        engines.runners[0].step_s = 0.01
        call = asyncio.create_task(replica.generate(request("a", max_tokens=200)))
        await until(lambda: replica.engine.loop.load().num_running == 1)
        call.cancel()
        await until(lambda: replica.engine.loop.load().num_running == 0)
        assert replica.engine.scheduler.account().private == 0

    asyncio.run(scenario())


def test_refusals_are_records_and_leave_nothing_behind(engines: InProcessEngines, replica: EngineReplica) -> None:
    async def scenario() -> None:
        engines.runners[0].gate.clear()
        calls = [asyncio.create_task(replica.generate(request("a", 2)))]
        await until(lambda: replica.engine.loop.has_work)
        await asyncio.sleep(0.05)
        calls.append(asyncio.create_task(replica.generate(request("b", 2))))
        await asyncio.sleep(0.05)
        full = await replica.generate(request("c"))
        assert (full.refusal, full.replica) == ("queue_full", "r0")
        assert 1 <= full.retry_after_s <= 60
        assert (await replica.generate(request("d", 9999))).refusal == "never_fits"
        assert (await replica.generate(request("a"))).refusal == "never_fits"  # the id is in use
        again = [(await replica.generate(request(name))).refusal for name in "cd"]
        assert again == ["queue_full"] * 2  # and not because the ids are in use
        engines.runners[0].gate.set()
        assert [ended(outcome) for outcome in await asyncio.gather(*calls)] == ["length"] * 2

    asyncio.run(scenario())


def test_a_grammar_that_cannot_be_compiled_is_refused_and_the_event_loop_stays_free(
    replica: EngineReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ingress checks grammars first, but a replica does not rely on it."""
    compile_, threads = replica.engine.grammars.compile, []

    def noticed(grammar: Grammar) -> object:
        threads.append(threading.current_thread())
        return compile_(grammar)

    async def scenario() -> CallOutcome:
        asked = request("r")
        return await replica.generate(
            structs.replace(asked, sampling=replace(asked.sampling, grammar=Grammar("regex", "(")))
        )

    monkeypatch.setattr(replica.engine.grammars, "compile", noticed)
    answer = asyncio.run(scenario())
    assert answer.refusal == "never_fits"
    assert "this model has no end-of-text token" in answer.reason  # true of these tests' model
    assert threads and threading.main_thread() not in threads


def test_an_engine_knows_the_tenant_of_a_request_and_lets_tenants_take_turns() -> None:
    """The batch has one place, and three requests of one tenant arrive before one of another tenant."""
    engines = InProcessEngines(
        1, WireTimings(absent_ingress_s=60), max_running=1, policy="fair", fair_quantum_tokens=1
    )
    replica = engines.replicas[0]

    async def scenario() -> list[str]:
        ended: list[str] = []

        async def ask(name: str, tenant: str) -> None:
            await replica.generate(structs.replace(request(name, 2), tenant=tenant))
            ended.append(name)

        engines.runners[0].gate.clear()
        calls = [asyncio.create_task(ask("a1", "a"))]
        await until(lambda: replica.engine.loop.load().num_running == 1)
        calls += [asyncio.create_task(ask(name, name[0])) for name in ("a2", "a3", "b1")]
        await asyncio.sleep(0)  # each call submits its request before it waits
        engines.runners[0].gate.set()
        await asyncio.gather(*calls)
        return ended

    try:
        assert asyncio.run(scenario()) == ["a1", "b1", "a2", "a3"]
    finally:
        engines.close()


def test_a_role_is_refused_where_a_model_needs_more_than_pages_to_continue() -> None:
    runner = CountingRunner(64)
    runner.num_state_slots = 8
    config = EngineConfig(model="hybrid", max_running=4)
    with pytest.raises(ValueError, match=r"engines\.roles .* hybrid needs more .*recurrent states.*remove roles"):
        EngineReplica(
            config,
            ReplicaSettings(role="decode"),
            engine_factory=lambda config: Engine.from_config(config, runner),
            whereabouts=lambda: ("hybrid-1", "127.0.0.1"),
        )


class _Loaded(Exception):
    """Ends a replica's construction where it would load its engine."""


@pytest.mark.parametrize(
    ("said", "num_sharing", "is_users", "threads"),
    [
        (None, 2, False, 3),  # of eight cores one is left to the ingress
        (5, 2, False, 5),
        (None, None, False, None),  # it reserves cores, and Ray has said so in OMP_NUM_THREADS
        (None, 2, True, None),
    ],
)
def test_engines_that_reserve_no_core_share_the_machines(
    monkeypatch: pytest.MonkeyPatch, said: int | None, num_sharing: int | None, is_users: bool, threads: int | None
) -> None:
    monkeypatch.setattr("deployments.replica.deployment.usable_cores", lambda: 8)
    monkeypatch.setattr("deployments.replica.deployment.was_started_with", lambda variable: is_users)

    def load(config: EngineConfig) -> Engine:
        raise _Loaded(config.threads)

    settings = ReplicaSettings(num_sharing=num_sharing)
    with pytest.raises(_Loaded) as found:
        EngineReplica(EngineConfig(threads=said), settings, None, load, lambda: ("r", "127.0.0.1"), lambda: False)
    assert found.value.args == (threads,)
