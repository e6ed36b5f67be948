"""A request that ends the engines which compute it is found and ended; nobody else is harmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import pytest

from deployments.client.protocol import EndsEngines
from deployments.client.remote_engines import RemoteEngines
from deployments.client.stream import Stream
from deployments.wire.messages import CLEARED_TOKENS
from engine.base.errors import RankLost
from engine.values.plan import Step, StepPlan
from monitoring.metrics import Metrics
from router.placer import Placeable
from tests.deployments.support.in_process_engines import (
    TIMINGS,
    ClientAndEngines,
    CountingRunner,
    InProcessEngines,
    request,
    router_like,
    until,
)
from tests.deployments.support.time_limit import run_scenario
from tests.deployments.support.told_deaths import Deaths
from tests.support.metric_values import count_of

ENOUGH = 40
"""Tokens of a stream that outlasts all that happens to it."""


def poison(engines: InProcessEngines, at_token: int) -> None:
    """Let engines die of a step that computes a token of a request named "poison"."""
    for runner in engines.runners:
        _before_steps(runner, lambda plan: _die_of(plan, at_token))


def _die_of(plan: StepPlan, at_token: int) -> None:
    if _has_poison(plan, at_token):
        raise RankLost("the process died")


def _has_poison(plan: StepPlan, at_token: int) -> bool:
    return any(
        chunk.request.request_id.startswith("poison") and chunk.request.num_output >= at_token
        for chunk in plan.chunks
    )


def _before_steps(runner: CountingRunner, act: Callable[[StepPlan], None]) -> None:
    prepare = runner.prepare

    def watched(plan: StepPlan) -> Step:
        step = prepare(plan)

        def run() -> Any:
            act(plan)
            return step()

        return run

    runner.prepare = watched  # type: ignore[method-assign]


def dead(engines: InProcessEngines) -> int:
    return sum(replica.engine.loop.failure is not None for replica in engines.replicas)


async def ended(stream: Stream) -> list[int] | EndsEngines:
    """Return all tokens of a stream, or the error that it ends with."""
    try:
        async for _ in stream:
            pass
    except EndsEngines as error:
        return error
    return stream.journal.token_ids


async def begin(client: RemoteEngines, *names: str) -> list[Stream]:
    return list(await asyncio.gather(*(client.generate(request(name, max_tokens=ENOUGH)) for name in names)))


def _has_tokens(stream: Stream, count: int) -> bool:
    return stream.journal.num_tokens >= count


def _runs_at(stream: Stream, replica: str) -> bool:
    return stream.replica == replica


def _has_accepted_poison(client: RemoteEngines, replica: str) -> bool:
    return any(wire_id.startswith("poison") for wire_id in client.received(replica))


def die(deaths: Deaths, engines: InProcessEngines, number: int) -> None:
    """End the process of a replica, for its client."""
    engines.fall_silent(number)
    deaths.tell(f"r{number}")


async def ready(client: RemoteEngines, count: int) -> None:
    await until(lambda: len(client.reachable()) == count)


def slowed(engines: InProcessEngines, step_s: float = 0.005) -> None:
    for runner in engines.runners:
        runner.step_s = step_s


TOKENS = list(range(1, ENOUGH + 1))


LATE = 2 * CLEARED_TOKENS
"""A token at which an engine hardly dies of a request."""


@pytest.mark.parametrize(("at_token", "costs"), [(0, 2), (3, 2), (LATE, 3)])
@pytest.mark.parametrize("num_others", [0, 3])
def test_a_request_that_ends_engines_ends_few_of_them_and_no_other_request(
    at_token: int, costs: int, num_others: int
) -> None:
    async def scenario() -> None:
        metrics = Metrics("m", "ingress", "ingress")
        async with ClientAndEngines(5, metrics=metrics, kv_pages=400) as (client, engines):
            await ready(client, 5)
            slowed(engines)
            others = await begin(client, *(f"other {n}" for n in range(num_others)))
            poison(engines, at_token)
            asked = asyncio.create_task(client.generate(request("poison", max_tokens=ENOUGH)))
            with pytest.raises(EndsEngines, match=f"{costs} engine replicas died"):
                await ended_or_raise(await asked)
            assert [await ended(other) for other in others] == [TOKENS] * num_others
            assert dead(engines) == costs
            assert count_of(metrics, "suspects_total", outcome="ended") == 1
            assert count_of(metrics, "suspects_total", outcome="cleared") >= num_others
            await until(lambda: client.num_streams == 0)
            assert not client._dispatch.suspects._replica_of

    run_scenario(scenario())


async def ended_or_raise(stream: Stream) -> list[int]:
    outcome = await ended(stream)
    if isinstance(outcome, EndsEngines):
        raise outcome
    return outcome


@pytest.mark.parametrize("at_token", [0, 3])
def test_a_request_whose_engines_vanish_without_an_error_costs_three(at_token: int) -> None:
    """As with a crash in native code. Two replicas that vanish would prove nothing: see the next test."""

    async def scenario() -> None:
        deaths = Deaths()
        async with ClientAndEngines(5, watcher=deaths, kv_pages=400) as (client, engines):
            await ready(client, 5)
            slowed(engines)
            others = await begin(client, "a", "b", "c")
            loop, vanished = asyncio.get_running_loop(), set[int]()

            async def vanish(number: int) -> None:
                await until(lambda: _has_accepted_poison(client, f"r{number}"))
                die(deaths, engines, number)

            def act(number: int, plan: StepPlan) -> None:
                if _has_poison(plan, at_token) and number not in vanished:
                    vanished.add(number)
                    asyncio.run_coroutine_threadsafe(vanish(number), loop).result()

            for number, runner in enumerate(engines.runners):
                _before_steps(runner, partial(act, number))
            asked = asyncio.create_task(client.generate(request("poison", max_tokens=ENOUGH)))
            with pytest.raises(EndsEngines, match="3 engine replicas died"):
                await ended_or_raise(await asked)
            assert [await ended(other) for other in others] == [TOKENS] * 3
            assert len(vanished) == 3

    run_scenario(scenario())


def test_the_loss_of_several_replicas_together_is_blamed_on_no_request() -> None:
    """As those of a node do: the second while the streams of the first have their trial there."""

    async def scenario() -> None:
        metrics = Metrics("m", "ingress", "ingress")
        deaths = Deaths()
        async with ClientAndEngines(3, metrics=metrics, watcher=deaths, kv_pages=400) as (client, engines):
            await ready(client, 3)
            slowed(engines)
            [stream] = await begin(client, "a")
            await anext(stream)
            engines.choose = lambda names: "r1" if "r1" in names else names[-1]
            engines.runners[1].gate.clear()  # so that its trial lasts
            die(deaths, engines, 0)
            await until(partial(_runs_at, stream, "r1"))
            die(deaths, engines, 1)
            assert await ended(stream) == TOKENS
            assert stream.replica == "r2"
            assert count_of(metrics, "suspects_total", outcome="cleared") == 1

    run_scenario(scenario())


def test_a_bystander_at_the_trial_migrates_unsuspected() -> None:
    """The second replica that a poison request ends had a stream of its own."""

    async def scenario() -> None:
        metrics = Metrics("m", "ingress", "ingress")
        async with ClientAndEngines(3, metrics=metrics, kv_pages=400) as (client, engines):
            await ready(client, 3)
            slowed(engines)
            engines.choose = lambda names: "r1" if "r1" in names else names[0]
            [bystander] = await begin(client, "bystander")
            await anext(bystander)
            engines.runners[1].gate.clear()
            poison(engines, at_token=2)
            engines.choose = lambda names: names[0]
            [culprit] = await begin(client, "poison")
            await until(lambda: _has_accepted_poison(client, "r1"))
            engines.runners[1].gate.set()
            assert isinstance(await ended(culprit), EndsEngines)
            assert await ended(bystander) == TOKENS
            assert (bystander.replica, dead(engines)) == ("r2", 2)
            assert count_of(metrics, "suspects_total", outcome="cleared") == 0

    run_scenario(scenario())


def test_suspects_take_turns_where_only_one_replica_is_left() -> None:
    async def scenario() -> None:
        deaths = Deaths()
        async with ClientAndEngines(2, watcher=deaths, kv_pages=400) as (client, engines):
            await ready(client, 2)
            slowed(engines)
            steps: dict[str, int] = {}
            most_at_once = 0

            def count(plan: StepPlan) -> None:
                nonlocal most_at_once
                ids = [chunk.request.request_id for chunk in plan.sampling_chunks]
                most_at_once = max(most_at_once, sum(steps.get(id_, 0) < CLEARED_TOKENS for id_ in ids))
                steps.update((id_, steps.get(id_, 0) + 1) for id_ in ids)

            _before_steps(engines.runners[1], count)
            engines.runners[0].gate.clear()
            streams = await begin(client, *(f"s{n}" for n in range(6)))
            die(deaths, engines, 0)
            assert [await ended(stream) for stream in streams] == [TOKENS] * 6
            assert (most_at_once, len(steps)) == (1, 6)

    run_scenario(scenario())


def test_a_request_that_had_run_for_long_where_its_replica_died_waits_for_no_turn() -> None:
    async def scenario() -> None:
        metrics, deaths = Metrics("m", "ingress", "ingress"), Deaths()
        async with ClientAndEngines(2, metrics=metrics, watcher=deaths, kv_pages=400) as (client, engines):
            await ready(client, 2)
            first, second = engines.runners

            def hold(plan: StepPlan) -> None:
                if min(chunk.request.num_output for chunk in plan.chunks) > LATE:
                    first.gate.clear()

            _before_steps(first, hold)
            first.gate.clear()
            second.gate.clear()
            streams = await begin(client, *(f"s{n}" for n in range(6)))
            first.gate.set()
            for stream in streams:
                await until(partial(_has_tokens, stream, CLEARED_TOKENS))
            die(deaths, engines, 0)
            # None of them has a token there, and still all are there.
            await until(lambda: engines.fleet.loads()["r1"] == 6)
            second.gate.set()
            assert [await ended(stream) for stream in streams] == [TOKENS] * 6
            assert count_of(metrics, "suspects_total", outcome="cleared") == 6

    run_scenario(scenario())


def test_suspects_whose_turn_does_not_come_in_time_resume_next_to_each_other() -> None:
    async def scenario() -> None:
        health, deaths = {"migration_wait_s": 2.0}, Deaths()
        async with ClientAndEngines(2, health=health, watcher=deaths, kv_pages=400) as (client, engines):
            await ready(client, 2)
            slowed(engines, 0.02)
            streams = await begin(client, *(f"s{n}" for n in range(6)))
            await asyncio.gather(*(anext(stream) for stream in streams))
            engines.runners[1].step_s = 0.5  # whoever comes first is not cleared in time
            die(deaths, engines, 0)
            await until(lambda: engines.calls.count("r1") == 6)
            engines.replicas[1].wire.fail_all("its engine ended")  # which proves nothing about any of them
            engines.runners[1].step_s = 0.005
            assert [await ended(stream) for stream in streams] == [TOKENS] * 6

    run_scenario(scenario())


def test_replicas_killed_in_turn_under_a_stream_that_runs_on_are_not_its_fault() -> None:
    async def scenario() -> None:
        deaths = Deaths()
        async with ClientAndEngines(4, watcher=deaths, kv_pages=400) as (client, engines):
            await ready(client, 4)
            slowed(engines)
            stream = await client.generate(request("a", max_tokens=300))  # a slow machine is late to kill them
            for number in range(3):
                await until(partial(_runs_at, stream, f"r{number}"))
                await until(partial(_has_tokens, stream, stream.journal.num_tokens + CLEARED_TOKENS + 1))
                die(deaths, engines, number)
            engines.runners[3].step_s = 0
            assert await ended(stream) == list(range(1, 301))
            assert len(stream.timeline.migrations) == 3

    run_scenario(scenario())


@pytest.mark.parametrize("how", ["silent", "draining"])
def test_a_replica_that_was_silent_or_being_stopped_proves_nothing(how: str) -> None:
    async def scenario() -> None:
        metrics, deaths = Metrics("m", "ingress", "ingress"), Deaths()
        async with ClientAndEngines(3, metrics=metrics, watcher=deaths, kv_pages=400) as (client, engines):
            await ready(client, 3)
            slowed(engines)
            [stream] = await begin(client, "a")
            await anext(stream)
            for number in range(2):
                replica = f"r{number}"
                await until(partial(_runs_at, stream, replica))
                if how == "draining":
                    engines.stopping.add(replica)
                    while not (await client.health()).replicas[number].is_draining:
                        await asyncio.sleep(0.005)
                    deaths.tell(replica)
                else:
                    client.on_answering(replica, False)
            assert await ended(stream) == TOKENS
            assert count_of(metrics, "suspects_total", outcome="cleared") == 0

    run_scenario(scenario())


@pytest.mark.parametrize(("at_token", "costs"), [(2, 2), (LATE, 3)])
def test_only_the_guilty_one_of_two_ingresses_suspects_is_ended(at_token: int, costs: int) -> None:
    """Neither knows of the other's suspects, but a replica tries only one of them at a time."""

    async def scenario() -> None:
        async with ClientAndEngines(4, kv_pages=400) as (client, engines):
            await ready(client, 4)
            router = router_like(engines)
            other = RemoteEngines(router, 4, timings=TIMINGS)
            try:
                await other.start()
                await ready(other, 4)
                slowed(engines)
                innocents = await begin(client, "a", "b", "c")
                await asyncio.gather(*(anext(stream) for stream in innocents))
                poison(engines, at_token)
                order = router.placer.order

                def at_r0(asked: Placeable, candidates: Collection[str], avoid: Collection[str]) -> Sequence[str]:
                    router.placer.order = order  # type: ignore[method-assign]
                    return order(asked, {"r0"}, avoid)

                router.placer.order = at_r0  # type: ignore[assignment,method-assign]
                [culprit] = await begin(other, "poison")
                outcome, *outcomes = await asyncio.gather(ended(culprit), *map(ended, innocents))
                assert isinstance(outcome, EndsEngines)
                assert outcomes == [TOKENS] * 3
                assert dead(engines) == costs
            finally:
                await other.aclose()

    run_scenario(scenario())
