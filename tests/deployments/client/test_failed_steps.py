"""A sick engine is left and replaced, and a request that fails the steps of healthy ones is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
import torch

from deployments.client.protocol import FailsSteps
from deployments.client.remote_engines import RemoteEngines
from deployments.client.stream import Stream
from deployments.replica.liveness import EngineUnhealthy
from deployments.wire.messages import CLEARED_TOKENS
from engine.program.self_test import FailureCause
from engine.values.plan import StepPlan
from monitoring.metrics import Metrics
from tests.deployments.support.failing_steps import fail_steps, has_poison
from tests.deployments.support.in_process_engines import (
    ClientAndEngines,
    InProcessEngines,
    is_nothing_left,
    request,
    until,
)
from tests.deployments.support.lossy_link import Noted
from tests.deployments.support.time_limit import run_scenario
from tests.support.metric_values import count_of

TOKENS = list(range(1, 41))


async def ready(client: RemoteEngines, count: int) -> None:
    await until(lambda: len(client.reachable()) == count)


async def tokens_of(stream: Stream) -> list[int]:
    async for _ in stream:
        pass
    return stream.journal.token_ids


async def answer(client: RemoteEngines, name: str) -> list[int]:
    return await tokens_of(await client.generate(request(name, max_tokens=40)))


def are_well(engines: InProcessEngines) -> bool:
    return not any(replica.engine.loop.failing for replica in engines.replicas)


def poisoned(at_token: int, error: type[Exception], plan: StepPlan) -> Exception | None:
    return error("scripted failure") if has_poison(plan, at_token) else None


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("at_token", [0, 3, 20])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_request_that_fails_steps_ends_and_the_others_continue(
    count: int, at_token: int, error: type[Exception]
) -> None:
    async def scenario() -> None:
        metrics = Metrics("m", "ingress", "ingress")
        async with ClientAndEngines(count, metrics=metrics, kv_pages=400) as (client, engines):
            await ready(client, count)
            for runner in engines.runners:
                runner.step_s = 0.005
                fail_steps(runner, partial(poisoned, at_token, error))
            others = [await client.generate(request(f"other {n}", max_tokens=40)) for n in range(3)]
            with pytest.raises(FailsSteps):
                await answer(client, "poison")
            assert [await tokens_of(other) for other in others] == [TOKENS] * 3
            assert count_of(metrics, "suspects_total", outcome="ended") == 1
            await until(partial(is_nothing_left, client, engines))
            assert are_well(engines)

    run_scenario(scenario())


def test_a_trial_next_to_a_request_that_has_just_begun_proves_nothing() -> None:
    """An innocent suspect is tried where another request comes that fails steps."""

    async def scenario() -> None:
        async with ClientAndEngines(2, kv_pages=400) as (client, engines):
            await ready(client, 2)
            for runner in engines.runners:
                fail_steps(runner, partial(poisoned, 0, RuntimeError))
                runner.gate.clear()

            innocent, first = (asyncio.create_task(answer(client, name)) for name in ("innocent", "poison 1"))
            await until(lambda: engines.fleet.loads()["r0"] == 2)
            engines.choose = lambda names: names[-1]
            engines.links["r1"].to_replica = trials = Noted(lambda sent: getattr(sent, "trial", None) == "alone")
            engines.runners[0].gate.set()
            await until(lambda: bool(trials.messages))
            second = asyncio.create_task(answer(client, "poison 2"))
            await until(lambda: engines.fleet.loads()["r1"] == 2)
            engines.runners[1].gate.set()
            assert await innocent == TOKENS
            for poison in (first, second):
                with pytest.raises(FailsSteps):
                    await poison

    run_scenario(scenario())


@pytest.mark.parametrize("count", [1, 2])
def test_a_stream_survives_any_number_of_steps_that_others_fail(count: int) -> None:
    """More than `max_migrations`: it is cleared each time."""

    async def scenario() -> None:
        async with ClientAndEngines(count, kv_pages=400, health={"max_migrations": 1}) as (client, engines):
            await ready(client, count)
            for runner in engines.runners:
                runner.step_s = 0.01
                fail_steps(runner, partial(poisoned, 0, RuntimeError))
            stream = await client.generate(request("a", max_tokens=150))
            for number in range(4):
                enough = stream.journal.num_tokens + 2 * CLEARED_TOKENS
                await until(lambda: stream.journal.num_tokens >= enough)  # noqa: B023
                at = stream.replica or ""
                engines.choose = lambda names: at if at in names else names[0]  # noqa: B023
                with pytest.raises(FailsSteps):
                    await answer(client, f"poison {number}")
            assert await tokens_of(stream) == list(range(1, 151))
            assert len(stream.timeline.migrations) > 1

    run_scenario(scenario())


def test_a_request_that_fails_steps_ends_no_engine_however_often_it_comes() -> None:
    """Nothing else runs, so that every step but the self-tests fails."""

    async def scenario() -> None:
        async with ClientAndEngines(2, kv_pages=400) as (client, engines):
            await ready(client, 2)
            for runner in engines.runners:
                fail_steps(runner, partial(poisoned, 0, RuntimeError))
            ends = await asyncio.gather(
                *(answer(client, f"poison {n}") for n in range(12)), return_exceptions=True
            )
            assert {type(end) for end in ends} == {FailsSteps}
            await until(partial(are_well, engines))
            for replica in engines.replicas:
                await replica.check_health()
            assert await answer(client, "other") == TOKENS

    run_scenario(scenario())


@pytest.mark.parametrize(
    ("kind", "text", "cause", "num_failed"),
    [
        (MemoryError, "", "memory", 3),
        (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", "memory", 3),
        (torch.OutOfMemoryError, "CUDA out of memory.", "memory", 3),
        (ValueError, "a defect", "other", 3),
        (torch.AcceleratorError, "CUDA error: device-side assert triggered", "device", 1),
        (RuntimeError, "CUDA error: an illegal memory access was encountered", "device", 1),
    ],
)
def test_an_engine_whose_steps_all_fail_is_left_and_replaced(
    kind: type[Exception], text: str, cause: FailureCause, num_failed: int
) -> None:
    """Nobody notices: what ran there goes on elsewhere, and nothing more is sent there although it has no work."""

    async def scenario() -> None:
        async with ClientAndEngines(2, kv_pages=400) as (client, engines):
            await ready(client, 2)
            engines.runners[0].step_s = 0.005
            begun = await client.generate(request("begun", max_tokens=40))
            await anext(begun)
            fail_steps(engines.runners[0], lambda plan: kind(text))
            new = await asyncio.gather(*(answer(client, f"new {n}") for n in range(4)))
            assert (await tokens_of(begun), new) == (TOKENS, [TOKENS] * 4)
            sick = engines.replicas[0]
            await until(lambda: sick.engine.loop.failure is not None)
            counts = sick.engine.loop.self_test.counts
            # One more where the next step was in flight, which failed likewise and proves nothing.
            assert num_failed <= counts[cause] == sum(counts.values()) <= num_failed + (cause != "device")
            with pytest.raises(EngineUnhealthy):
                await sick.check_health()
            await until(lambda: client.reachable() == {"r1"})
            health = await client.health()
            assert (health.state, [one.failing for one in health.replicas]) == ("degraded", [cause, None])
            engines.calls.clear()
            assert [await answer(client, f"later {n}") for n in range(3)] == [TOKENS] * 3
            assert engines.calls == ["r1"] * 3

    run_scenario(scenario())


def test_an_engine_that_can_compute_small_steps_only_is_replaced_too() -> None:
    """It has memory for a token, but not for a prompt: a small self-test would pass."""

    async def scenario() -> None:
        async with ClientAndEngines(2, kv_pages=400) as (client, engines):
            await ready(client, 2)
            fail_steps(engines.runners[0], lambda plan: MemoryError() if plan.num_tokens > 4 else None)
            assert await answer(client, "a") == TOKENS
            await until(lambda: engines.replicas[0].engine.loop.failure is not None)

    run_scenario(scenario())


def test_a_shortage_that_passes_costs_an_engine_a_moment_only() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1, kv_pages=400) as (client, engines):
            await ready(client, 1)
            errors: list[Exception] = [MemoryError(), MemoryError()]
            fail_steps(engines.runners[0], lambda plan: errors.pop() if errors else None)
            assert await answer(client, "a") == TOKENS
            assert are_well(engines)
            await until(lambda: client.reachable() == {"r0"})
            assert (await client.health()).state == "healthy"

    run_scenario(scenario())


def test_failed_steps_open_the_circuit_and_acceptance_does_not_close_it() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1, kv_pages=400) as (client, engines):
            await ready(client, 1)
            state: Callable[[], int] = lambda: engines.fleet.count_by_state()["circuit_open"]  # noqa: E731
            fail_steps(engines.runners[0], partial(poisoned, 0, RuntimeError))
            for number in range(3):
                assert state() == 0
                with pytest.raises(FailsSteps):
                    await answer(client, f"poison {number}")
                await until(partial(are_well, engines))
            await until(lambda: state() == 1)
            assert await answer(client, "other") == TOKENS  # as there is no other replica

    run_scenario(scenario())
