"""Requests through client, wire and real engine loops, without Ray."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from deployments.client.attempt import ClientTimings
from deployments.client.protocol import GenerateRequest, Overloaded, Rejected, ReplicaLost, Unavailable
from deployments.client.remote_engines import RemoteEngines
from deployments.client.stream import Stream
from deployments.replica.deployment import EngineReplica
from deployments.replica.intake import Refusal
from deployments.wire import messages
from deployments.wire.deadlines.deadline import watch_of
from engine.base.awake_clock import STILL_S, AwakeClock
from engine.grammar.spec import Grammar
from engine.settings.config import EngineConfig
from router.state import RouterState
from tests.deployments.support.in_process_engines import (
    SILENCE,
    TIMINGS,
    ChosenPlacer,
    ClientAndEngines,
    CountingRunner,
    InProcessEngines,
    request,
    router_like,
    until,
)
from tests.deployments.support.lossy_link import Lost, Noted, lose
from tests.deployments.support.time_limit import run_scenario
from tests.deployments.support.told_deaths import Deaths


async def tokens_of(stream: Stream) -> list[int]:
    return [token async for event in stream for token in event.token_ids]


def test_a_request_gets_its_tokens_in_order_and_its_end() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1) as (client, _):
            stream = await client.generate(request("a", max_tokens=50))
            events = [event async for event in stream]
            assert [token for event in events for token in event.token_ids] == list(range(1, 51))
            assert [event.finish_reason for event in events if event.finish_reason] == ["length"]
            assert stream.replica == "r0"
            assert events[-1].timings is not None

    run_scenario(scenario())


def test_a_stream_that_has_ended_and_its_prompt_are_freed_without_a_collection() -> None:
    """Full collections are rare in an ingress, and what they find is as large as the prompts of its requests."""

    async def scenario() -> None:
        async with ClientAndEngines(1) as (client, _):
            stream = await client.generate(request("a"))
            assert await tokens_of(stream) == [1, 2, 3, 4, 5]
            await until(lambda: client.num_streams == 0)
            kept = weakref.ref(stream)
            gc.disable()
            try:
                del stream
                assert kept() is None
            finally:
                gc.enable()

    run_scenario(scenario())


def test_the_first_token_comes_while_the_second_step_is_still_held_back() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1) as (client, engines):
            engines.runners[0].step_s = 0.3
            stream = await client.generate(request("a", max_tokens=3))
            event = await anext(stream)
            assert event.token_ids == [1]
            await stream.aclose()

    run_scenario(scenario())


def test_a_slow_reader_gets_merged_events() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1) as (client, _):
            stream = await client.generate(request("a", max_tokens=40))
            await until(lambda: stream.has_ended)
            event = await anext(stream)
            assert event.token_ids == list(range(1, 41))
            assert event.finish_reason == "length"
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    run_scenario(scenario())


def test_leaving_a_stream_frees_its_pages_within_a_step() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1) as (client, engines):
            engines.runners[0].step_s = 0.05
            stream = await client.generate(request("a", max_tokens=200))
            await anext(stream)
            scheduler = engines.replicas[0].engine.scheduler
            steps = scheduler.load(0).num_steps
            await stream.aclose()
            await until(lambda: scheduler.account().locked + scheduler.account().private == 0)
            # One step was running when the client disconnected; the next one no longer holds the request.
            assert scheduler.load(0).num_steps - steps <= 2
            await until(lambda: client.num_streams == 0)
            assert engines.fleet.loads() == {"r0": 0}

    run_scenario(scenario())


def test_a_full_queue_elsewhere_is_tried_before_the_client_hears_of_overload() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(2, max_running=1, max_waiting=1) as (client, engines):
            for runner in engines.runners:
                runner.gate.clear()
            streams: list[Stream] = []

            def is_settled() -> bool:  # the first of each engine runs
                return sum(map(_num_running, engines.replicas)) == (len(streams) + 1) // 2

            with pytest.raises(Overloaded) as refused:
                for number in range(20):
                    streams.append(await client.generate(request(f"q{number}", max_tokens=2)))
                    await until(is_settled)
            assert len(streams) == 4  # one running and one waiting in each
            assert refused.value.retry_after_s >= 1
            assert engines.calls[-2:] == ["r0", "r1"]
            for runner in engines.runners:
                runner.gate.set()
            for stream in streams:
                assert await tokens_of(stream) == [1, 2]

    run_scenario(scenario())


def test_a_request_that_never_fits_is_rejected_immediately() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1) as (client, engines):
            with pytest.raises(Rejected, match="at most"):
                await client.generate(request("a", max_tokens=5000))
            with pytest.raises(Rejected, match="vocabulary"):
                await client.generate(request("b", prompt_len=2000))
            assert engines.replicas[0].wire.num_live == 0

    run_scenario(scenario())


@pytest.mark.parametrize("count", [0, 1])
def test_without_replicas_a_request_is_refused_and_does_not_wait(count: int) -> None:
    """None has answered yet, or the model was unloaded."""

    async def scenario() -> None:
        async with ClientAndEngines(count) as (client, engines):
            await until(lambda: client.expects_engines == bool(count))
            engines.fleet.update({})
            client.expect_none()
            with pytest.raises(Unavailable):
                await client.generate(request("a"))

    run_scenario(scenario())


def test_a_replica_that_falls_silent_before_the_first_token_is_replaced_unnoticed() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(2, health=SILENCE) as (client, engines):
            engines.runners[0].gate.clear()
            stream = await client.generate(request("a", max_tokens=5))
            engines.fall_silent(0)
            assert await tokens_of(stream) == [1, 2, 3, 4, 5]
            assert engines.calls == ["r0", "r1"]
            assert stream.replica == "r1"
            assert (await client.health()).state == "degraded"

    run_scenario(scenario())


def test_a_replica_that_falls_silent_before_it_accepts_is_replaced_unnoticed() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(2, health=SILENCE) as (client, engines):
            await _connected(client)
            engines.fall_silent(0)
            streams = await asyncio.gather(*(client.generate(request(f"s{n}", max_tokens=5)) for n in range(3)))
            for stream in streams:
                assert await tokens_of(stream) == [1, 2, 3, 4, 5]
                assert stream.replica == "r1"
            await until(lambda: engines.fleet.loads()["r0"] == 0)

    run_scenario(scenario())


def test_a_replica_whose_process_died_is_given_up_immediately_whether_it_accepted_or_not() -> None:
    async def scenario() -> None:
        deaths = Deaths()
        async with ClientAndEngines(2, watcher=deaths, health={"lost_after_s": 600}) as (client, engines):
            engines.runners[0].step_s = 0.02
            begun = await client.generate(request("a", max_tokens=60))
            await anext(begun)
            engines.fall_silent(0)
            unanswered = asyncio.create_task(client.generate(request("b", max_tokens=5)))
            await until(lambda: bool(list(client.unanswered("r0"))))
            deaths.tell("r0")
            assert await tokens_of(await unanswered) == [1, 2, 3, 4, 5]
            await tokens_of(begun)
            assert (begun.replica, [m.reason for m in begun.timeline.migrations]) == ("r1", ["died"])

    run_scenario(scenario())


def test_a_replica_lost_after_the_first_token_costs_its_streams_a_pause() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(2, health=SILENCE) as (client, engines):
            engines.runners[0].step_s = 0.02
            streams = [await client.generate(request(f"s{n}", max_tokens=60)) for n in range(5)]
            begun = [await anext(stream) for stream in streams]
            engines.fall_silent(0)
            for first, stream in zip(begun, streams, strict=True):
                events = [first, *[event async for event in stream]]
                assert [token for event in events for token in event.token_ids] == list(range(1, 61))
                assert stream.journal.token_ids == list(range(1, 61))
                assert events[-1].finish_reason == "length"
                assert (stream.replica, len(stream.timeline.migrations)) == ("r1", 1)
            await until(lambda: all(_is_idle(replica) for replica in engines.replicas))

    run_scenario(scenario())


def test_the_migrations_of_a_stream_are_limited() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(2, health={**SILENCE, "max_migrations": 0}) as (client, engines):
            engines.runners[0].step_s = 0.02
            stream = await client.generate(request("a", max_tokens=200))
            await anext(stream)
            engines.fall_silent(0)
            with pytest.raises(ReplicaLost):
                await tokens_of(stream)
            assert engines.calls == ["r0"]

    run_scenario(scenario())


def test_when_no_replica_is_left_the_stream_ends_with_a_reason() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1, health={**SILENCE, "migration_wait_s": 0.2}) as (client, engines):
            engines.runners[0].step_s = 0.02
            stream = await client.generate(request("a", max_tokens=200))
            await anext(stream)
            engines.fall_silent(0)
            with pytest.raises(ReplicaLost):
                await tokens_of(stream)
            assert (await client.health()).state == "unhealthy"

    run_scenario(scenario())


def test_a_stream_continues_at_the_replica_that_comes_back() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1, health={"lost_after_s": 2.0}) as (client, engines):
            engines.runners[0].step_s = 0.02
            stream = await client.generate(request("a", max_tokens=40))
            first = await anext(stream)
            engines.fall_silent(0)
            await until(lambda: engines.fleet.lost() == {"r0"})
            engines.speak(0)
            assert [*first.token_ids, *await tokens_of(stream)] == list(range(1, 41))
            assert engines.calls == ["r0", "r0"]

    run_scenario(scenario())


def test_a_broken_stream_waits_for_room_instead_of_being_refused() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(2, max_running=1, max_waiting=1, health=SILENCE) as (client, engines):
            engines.runners[0].step_s = 0.02
            stream = await client.generate(request("a", max_tokens=60))
            first = await anext(stream)
            engines.runners[1].gate.clear()
            others = []
            for number in range(2):  # one runs, one waits: r1 is full
                engines.choose = lambda names: names[-1]
                others.append(await client.generate(request(f"b{number}", max_tokens=3)))
                await asyncio.sleep(0.05)
            engines.fall_silent(0)
            await until(lambda: engines.calls.count("r1") >= 5)
            engines.runners[1].gate.set()
            assert [*first.token_ids, *await tokens_of(stream)] == list(range(1, 61))
            for other in others:
                assert await tokens_of(other) == [1, 2, 3]

    run_scenario(scenario())


def test_a_stream_that_loses_several_replicas_in_turn_continues() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(3, health=SILENCE) as (client, engines):
            for runner in engines.runners:
                runner.step_s = 0.02
            stream = await client.generate(request("a", max_tokens=120))
            first = await anext(stream)
            engines.fall_silent(0)
            await until(lambda: stream.replica == "r1" and stream.journal.num_tokens > 30)
            engines.fall_silent(1)
            assert [*first.token_ids, *await tokens_of(stream)] == list(range(1, 121))
            assert engines.calls == ["r0", "r1", "r2"]

    run_scenario(scenario())


def test_a_request_that_is_slow_to_begin_is_sent_to_a_second_replica() -> None:
    async def scenario() -> None:
        hedging = {"hedge_after_s": 0.1, "hedge_share": 1.0}
        async with ClientAndEngines(2, health=hedging) as (client, engines):
            engines.runners[0].gate.clear()
            stream = await client.generate(request("a", max_tokens=5))
            assert await tokens_of(stream) == [1, 2, 3, 4, 5]
            assert engines.calls == ["r0", "r1"]
            engines.runners[0].gate.set()
            await until(lambda: all(_is_idle(replica) for replica in engines.replicas))
            assert sum(engines.fleet.loads().values()) == 0

    run_scenario(scenario())


def test_the_first_to_begin_of_two_replicas_that_accepted_counts() -> None:
    async def scenario() -> None:
        hedging = {"hedge_after_s": 0.05, "hedge_share": 1.0}
        async with ClientAndEngines(2, health=hedging) as (client, engines):
            for runner in engines.runners:
                runner.gate.clear()
            stream = await client.generate(request("a", max_tokens=5))
            await until(lambda: stream.replica == "r1")
            engines.runners[0].gate.set()
            assert await tokens_of(stream) == [1, 2, 3, 4, 5]
            assert stream.replica == "r0" and [span.replica for span in stream.timeline.spans] == ["r0"]

    run_scenario(scenario())


def test_hedging_stays_within_its_budget() -> None:
    async def scenario() -> None:
        hedging = {"hedge_after_s": 0.05, "hedge_share": 0.0}
        async with ClientAndEngines(2, health=hedging) as (client, engines):
            engines.runners[0].gate.clear()
            streams = [await client.generate(request(f"s{n}", max_tokens=3)) for n in range(4)]
            await asyncio.sleep(0.3)
            assert engines.calls.count("r1") == 1  # the initial credit of the budget
            engines.runners[0].gate.set()
            for stream in streams:
                assert await tokens_of(stream) == [1, 2, 3]

    run_scenario(scenario())


def test_a_replica_that_cannot_take_a_request_is_a_lost_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    async def scenario() -> None:
        async with ClientAndEngines(1) as (client, engines):
            monkeypatch.setattr(engines.replicas[0].engine, "new_request", explode)
            with pytest.raises(Unavailable, match="could not take the request"):
                await client.generate(request("a"))
            assert len(engines.calls) == 3  # two retries

    run_scenario(scenario())


def test_a_dead_engine_hands_its_streams_over_immediately() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(2) as (client, engines):
            engines.runners[0].step_s = 0.02
            stream = await client.generate(request("a", max_tokens=60))
            first = await anext(stream)
            engines.replicas[0].engine.loop.fail("the device is gone")
            assert [*first.token_ids, *await tokens_of(stream)] == list(range(1, 61))
            assert (stream.replica, [m.reason for m in stream.timeline.migrations]) == ("r1", ["failed"])

    run_scenario(scenario())


def test_many_streams_over_two_replicas_keep_apart() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(2, kv_pages=2000) as (client, engines):
            turn = iter(range(1000))
            engines.choose = lambda names: names[next(turn) % len(names)]
            streams = await asyncio.gather(
                *(client.generate(request(f"s{n}", max_tokens=20 + n)) for n in range(40))
            )
            for number, tokens in enumerate(await asyncio.gather(*map(tokens_of, streams))):
                assert tokens == list(range(1, 21 + number))
            await until(lambda: sum(engines.fleet.loads().values()) == 0)
            assert (await client.health()).state == "healthy"

    run_scenario(scenario())


def test_lost_tokens_are_requested_again() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1) as (client, engines):
            engines.runners[0].step_s = 0.01
            lossy = Noted(
                lambda message: _has_tokens(message) and message.deltas[0].start in (5, 6, 9), num_lost=3
            )
            engines.links["r0"].to_ingress = lossy
            stream = await client.generate(request("a", max_tokens=30))
            assert await tokens_of(stream) == list(range(1, 31))
            assert lossy.messages
            assert client.wire_counts()["gaps"] >= 1

    run_scenario(scenario())


def test_a_replica_of_an_older_release_is_refused_and_another_one_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def of_an_older_release(message: messages.ToIngress) -> Iterable[messages.ToIngress]:
        return [structs.replace(message, version=0)] if isinstance(message, messages.Welcome) else ()

    async def scenario() -> None:
        async with ClientAndEngines(2) as (client, engines):
            engines.links["r0"].to_ingress = of_an_older_release
            await until(lambda: client.reachable() == {"r1"})
            await until(lambda: "the replica has wire version 0" in caplog.text)
            stream = await client.generate(request("a"))
            assert await tokens_of(stream) == [1, 2, 3, 4, 5]
            assert stream.replica == "r1"

    run_scenario(scenario())


def test_a_client_learns_the_prefixes_of_replicas_from_a_snapshot_and_then_from_deltas() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(2) as (client, engines):
            first = await client.generate(request("a", max_tokens=2, prompt_len=64))
            await tokens_of(first)
            known = request("b", prompt_len=64)
            await until(lambda: client.placer.uncached_tokens(known) == 1)  # all blocks: 4 of 16
            other = RemoteEngines(router_like(engines), 2, timings=TIMINGS)
            try:
                await other.start()
                assert await other.wait_for_prefixes(5)
                assert other.placer.uncached_tokens(known) == 1
            finally:
                await other.aclose()

    run_scenario(scenario())


def test_a_lost_delta_is_replaced_by_a_snapshot() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1) as (client, engines):
            await until(lambda: client.num_synced == 1)
            lossy = Noted(lambda message: isinstance(message, messages.PrefixDelta), num_lost=1)
            engines.links["r0"].to_ingress = lossy
            await tokens_of(await client.generate(request("a", max_tokens=2, prompt_len=64)))
            await until(lambda: bool(lossy.messages))
            await until(lambda: client.placer.uncached_tokens(request("b", prompt_len=64)) == 1)
            assert client.wire_counts()["gaps"] >= 1

    run_scenario(scenario())


def test_the_index_lags_while_a_replica_is_silent_and_while_its_deltas_cannot_be_applied() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1, health=SILENCE) as (client, engines):
            await until(lambda: client.num_synced == 1)
            await until(lambda: client.index_lag() < 1.0)  # heartbeats, though nothing changes
            path = engines.links["r0"]
            path.to_ingress = silent = Lost(lambda _: True)  # messages stop, but it counts as connected
            before = client.index_lag()
            await asyncio.sleep(0.05)
            assert client.index_lag() >= before + 0.05
            await until(lambda: bool(silent.messages))
            # Messages arrive, but some were lost and the snapshot that replaces them has not arrived yet.
            path.to_ingress = snapshots = Lost(lambda message: isinstance(message, messages.PrefixSnapshot))
            before = client.index_lag()
            await until(lambda: bool(snapshots.messages))
            assert client.index_lag() > before
            path.to_ingress = None
            await until(lambda: client.index_lag() < before)
            engines.fleet.update({})
            await until(lambda: client.index_lag() == 0.0)

    run_scenario(scenario())


def test_a_lost_welcome_is_asked_for_again() -> None:
    """After it a replica counts its messages from 0, and reports no change of its cache until it is asked to."""

    async def scenario() -> None:
        async with ClientAndEngines(1) as (client, engines):
            await until(lambda: client.num_synced == 1)
            path = engines.links["r0"]

            def lose_until_after_a_welcome(message: messages.ToIngress) -> Iterable[messages.ToIngress]:
                if isinstance(message, messages.Welcome):
                    path.to_ingress = None
                return ()

            path.to_ingress = lose_until_after_a_welcome
            await until(lambda: path.to_ingress is None)
            other = RemoteEngines(router_like(engines), 1, timings=TIMINGS)
            try:
                await other.start()
                await tokens_of(await other.generate(request("a", max_tokens=2, prompt_len=64)))
                await until(lambda: client.placer.uncached_tokens(request("b", prompt_len=64)) == 1, timeout=20)
            finally:
                await other.aclose()

    run_scenario(scenario())


def test_messages_sent_twice_or_in_another_epoch_are_dropped_and_counted() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1) as (client, engines):
            await until(lambda: client.num_synced == 1)
            poisoned = [1, 2, 3]
            inserted: list[messages.PrefixDelta] = []

            def insert(message: messages.Heartbeat) -> Iterable[messages.ToIngress]:
                engines.links["r0"].to_ingress = None
                for epoch, seq in ((message.epoch, 0), (message.epoch + 1, 10**9)):
                    inserted.append(messages.PrefixDelta(epoch, seq, messages.pack_hashes(poisoned), b""))
                return (*inserted, message)

            engines.links["r0"].to_ingress = insert
            await until(lambda: client.wire_counts()["epoch"] == 1)
            assert (client.wire_counts()["replayed"], len(inserted)) == (1, 2)
            known = structs.replace(request("a", prompt_len=64), block_hashes=poisoned)
            assert client.placer.uncached_tokens(known) == 64

    run_scenario(scenario())


@pytest.mark.parametrize("what", ["epoch", "model"])
def test_a_replica_of_another_start_or_model_is_not_used(what: str) -> None:
    async def scenario() -> None:
        def load(config: EngineConfig) -> CountingRunner:
            runner = CountingRunner(config.kv_pages or 0)
            runner.fingerprint = "another" if what == "model" else ""
            return runner

        async with ClientAndEngines(1, load=load) as (client, engines):
            router = router_like(engines, epoch_shift=1 if what == "epoch" else 0)
            other = RemoteEngines(router, 1, timings=TIMINGS, model="mine")
            try:
                await other.start()
                await until(lambda: router.fleet.lost() == {"r0"})
                with pytest.raises(Unavailable):
                    await other.generate(request("a"))
            finally:
                await other.aclose()
            assert await tokens_of(await client.generate(request("b", max_tokens=2))) == [1, 2]

    run_scenario(scenario())


def test_ingresses_see_each_others_requests() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1, kv_pages=400) as (client, engines):
            router = router_like(engines)
            other = RemoteEngines(router, 1, timings=TIMINGS)
            try:
                await other.start()
                await other.wait_for_prefixes(5)
                engines.runners[0].gate.clear()
                await client.generate(request("elsewhere", prompt_len=800))
                await until(lambda: router.fleet.candidates(["r0"])[0].num_running == 1)
                engines.runners[0].gate.set()
            finally:
                await other.aclose()

    run_scenario(scenario())


def test_one_of_two_ingresses_that_race_for_the_last_place_gets_it() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1, max_running=1, max_waiting=1) as (client, engines):
            router = router_like(engines)
            other = RemoteEngines(router, 1, timings=TIMINGS)
            try:
                await other.start()
                await other.wait_for_prefixes(5)
                engines.runners[0].gate.clear()
                running = await client.generate(request("running", max_tokens=2))
                await until(lambda: router.fleet.candidates(["r0"])[0].num_running == 1)
                asked = [
                    one.generate(request(f"late-{at}", max_tokens=2)) for at, one in enumerate((client, other))
                ]
                told = await asyncio.gather(*asked, return_exceptions=True)
                assert sorted(type(each).__name__ for each in told) == ["Overloaded", "Stream"]
                engines.runners[0].gate.set()
                for stream in (running, *(each for each in told if isinstance(each, Stream))):
                    assert await tokens_of(stream) == [1, 2]
                assert engines.replicas[0].wire.num_live == 0
            finally:
                await other.aclose()

    run_scenario(scenario())


def test_a_request_or_its_answer_that_is_lost_is_sent_again_and_runs_once() -> None:
    """No message arrives from the replica, nor perhaps at it, until it welcomes the ingress again. Nothing is sent
    again because it was not answered in time.
    """

    async def scenario(is_request: bool) -> None:
        async with ClientAndEngines(1, timings=replace(TIMINGS, repeat_s=600.0)) as (client, engines):
            await _connected(client)
            engines.fall_silent(0)
            if is_request:
                engines.links["r0"].to_replica = lose
            asked = asyncio.create_task(client.generate(request("a", max_tokens=5)))
            if is_request:
                await until(lambda: bool(list(client.unanswered("r0"))))
            else:
                await until(lambda: engines.replicas[0].engine.loop.load().num_finished == 1)

            def lose_until_welcome(message: messages.ToIngress) -> Iterable[messages.ToIngress]:
                if not isinstance(message, messages.Welcome):
                    return ()
                engines.speak(0)
                return (message,)

            engines.links["r0"].to_replica = None
            engines.links["r0"].to_ingress = lose_until_welcome
            assert await tokens_of(await asked) == [1, 2, 3, 4, 5]
            assert engines.replicas[0].engine.loop.load().num_finished == 1
            assert engines.calls == ["r0"]

    run_scenario(scenario(True))
    run_scenario(scenario(False))


def test_no_request_is_sent_again_because_this_process_stood_still() -> None:
    """All prompts at once would be. The clock for deadlines is the test's."""

    async def scenario() -> None:
        paused_s = 0.0
        watch = watch_of(asyncio.get_running_loop())
        watch.now = AwakeClock(lambda: watch.loop.time() + paused_s).now

        async def pass_time(seconds: float) -> None:
            nonlocal paused_s
            paused_s += seconds
            await asyncio.sleep(4 * TIMINGS.tick_s)  # a tick is due before this timer

        timings = replace(TIMINGS, accept_s=600.0, repeat_s=20.0)
        async with ClientAndEngines(1, timings=timings) as (client, engines):
            await _connected(client)
            sent = Noted(lambda message: isinstance(message, messages.Generate), num_lost=1)
            engines.links["r0"].to_replica = sent
            asked = asyncio.create_task(client.generate(request("a", max_tokens=5)))
            await until(lambda: bool(sent.messages))
            await pass_time(3600.0)
            assert len(sent.messages) == 1
            while len(sent.messages) == 1:
                await pass_time(STILL_S)
            assert paused_s > 3610.0
            assert await tokens_of(await asked) == [1, 2, 3, 4, 5]

    run_scenario(scenario())


@pytest.mark.parametrize("kind", [messages.Generate, messages.Resume, messages.Abort])
def test_a_message_to_a_replica_that_a_broken_connection_lost_is_made_up_for(kind: type) -> None:
    """ZeroMQ connects anew by itself, and neither side is told that a message was lost."""

    async def scenario() -> None:
        async with ClientAndEngines(1, timings=replace(TIMINGS, repeat_s=0.1)) as (client, engines):
            await _connected(client)
            engines.links["r0"].to_replica = sent = Noted(lambda message: isinstance(message, kind), num_lost=1)
            if kind is messages.Resume:
                engines.links["r0"].to_ingress = Lost(
                    lambda message: _has_tokens(message) and not _is_end(message)
                )
            if kind is messages.Abort:
                engines.runners[0].step_s = 0.1
                stream = await client.generate(request("a", max_tokens=200))
                await anext(stream)
                await stream.aclose()
                await until(lambda: _is_idle(engines.replicas[0]))
                assert len(sent.messages) > 1
            else:
                asked = request("a", max_tokens=30)
                assert await tokens_of(await client.generate(asked)) == list(range(1, 31))
            assert sent.messages

    run_scenario(scenario())


def test_a_request_that_is_larger_than_a_message_may_be_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.wire.link.MAX_REQUEST_BYTES", 1000)

    async def scenario() -> None:
        async with ClientAndEngines(1) as (client, engines):
            with pytest.raises(Rejected, match="at most 1000 are allowed"):
                await client.generate(request("a", prompt_len=500))
            assert await tokens_of(await client.generate(request("b", max_tokens=2))) == [1, 2]
            await until(lambda: engines.fleet.loads() == {"r0": 0})

    run_scenario(scenario())


def with_grammar(asked: GenerateRequest) -> GenerateRequest:
    return structs.replace(asked, sampling=replace(asked.sampling, grammar=Grammar("regex", "a")))


def compiling_late(replica: EngineReplica) -> threading.Event:
    """Have a replica compile grammars, and refuse them, when the event is set."""
    may_compile = threading.Event()

    def compile_late(grammar: Grammar) -> Refusal:
        may_compile.wait(60)
        return Refusal("never_fits", "nobody waits for it")

    replica.intake.compile = compile_late  # type: ignore[method-assign]
    return may_compile


def test_a_grammar_s_request_can_be_left_while_the_grammar_is_compiled() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1) as (client, engines):
            replica = engines.replicas[0]
            asked, may_compile = with_grammar(request("a")), compiling_late(replica)
            task = asyncio.create_task(client.generate(asked))
            await until(lambda: replica.intake.num_compiling > 0)
            task.cancel()
            await until(lambda: not replica.intake.num_compiling)
            may_compile.set()
            assert await tokens_of(await client.generate(request("b", max_tokens=2))) == [1, 2]
            assert replica.engine.loop.load().num_finished == 1

    run_scenario(scenario())


def test_a_request_that_no_engine_accepts_in_time_is_given_up_at_both_ends() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(1, ClientTimings(accept_s=0.1, tick_s=0.03)) as (client, engines):
            replica = engines.replicas[0]
            asked, may_compile = with_grammar(request("a")), compiling_late(replica)
            with pytest.raises(Unavailable, match=r"no engine accepted within 0\.1 s"):
                await client.generate(asked)
            await until(lambda: not replica.intake.num_compiling)
            await until(lambda: client.num_streams == 0)  # its task ends after its reader has the error
            await until(lambda: engines.fleet.loads() == {"r0": 0})
            may_compile.set()

    run_scenario(scenario())


async def _connected(client: RemoteEngines) -> None:
    await until(lambda: client.expects_engines)  # one has answered


def _has_tokens(message: Any) -> bool:
    return any(delta.token_ids for delta in getattr(message, "deltas", ()))


def _is_end(message: Any) -> bool:
    return any(delta.finish_reason for delta in getattr(message, "deltas", ()))


def _num_running(replica: Any) -> int:
    running: int = replica.engine.loop.load().num_running
    return running


def _is_idle(replica: Any) -> bool:
    account = replica.engine.scheduler.account()
    return bool(account.locked + account.private == 0 and not replica.engine.loop.has_work)


async def _held_back(engines: InProcessEngines) -> dict[str, float]:
    """What each replica tells the autoscaler of requests that wait in ingresses."""
    stats = {replica.replica: await replica.record_autoscaling_stats() for replica in engines.replicas}
    return {name: each["held_back"] for name, each in stats.items()}


async def _reports(engines: InProcessEngines, expected: dict[str, float]) -> None:
    """Wait until the replicas report this; the rest of a scenario's time is the limit."""
    while await _held_back(engines) != expected:
        await asyncio.sleep(0.02)


def test_the_backlog_of_an_ingress_is_reported_to_one_replica_and_to_another_when_that_is_lost() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(3, health=SILENCE) as (client, engines):
            assert await _held_back(engines) == {"r0": 0, "r1": 0, "r2": 0}
            client.report_backlog(lambda role: messages.Backlog(7, 7000))
            await _reports(engines, {"r0": 7, "r1": 0, "r2": 0})
            client.report_backlog(lambda role: messages.Backlog(5, 5000))
            await _reports(engines, {"r0": 5, "r1": 0, "r2": 0})
            engines.fall_silent(0)
            await _reports(engines, {"r0": 0, "r1": 5, "r2": 0})  # the first has not heard of it for too long
            engines.stopping.add("r1")  # the autoscaler does not hear those that are being stopped
            await _reports(engines, {"r0": 0, "r1": 0, "r2": 5})
            engines.fleet.update(
                {name: address for name, address in engines.fleet.addresses().items() if name == "r1"}
            )
            await _reports(engines, {"r0": 0, "r1": 0, "r2": 0})  # nobody is left

    run_scenario(scenario())


def test_where_replicas_have_roles_one_of_each_gets_the_backlog_of_its_role() -> None:
    def backlog(role: str) -> messages.Backlog:
        return messages.Backlog({"prefill": 3, "decode": 8}[role], 1000)

    async def scenario() -> None:
        async with ClientAndEngines(4, roles=("prefill", "prefill", "decode", "decode")) as (client, engines):
            client.report_backlog(backlog)
            await _reports(engines, {"r0": 3, "r1": 0, "r2": 8, "r3": 0})
            engines.stopping |= {"r0", "r2"}
            await _reports(engines, {"r0": 0, "r1": 3, "r2": 0, "r3": 8})
            engines.stopping.add("r1")  # nobody of the role is left, and others do not count its work twice
            await _reports(engines, {"r0": 0, "r1": 0, "r2": 0, "r3": 8})

    run_scenario(scenario())


def test_the_backlogs_of_several_ingresses_count_until_they_die() -> None:
    async def scenario() -> None:
        async with ClientAndEngines(2) as (client, engines):
            other = RemoteEngines(RouterState(engines.fleet, ChosenPlacer(engines)), 2, timings=TIMINGS)
            await other.start()
            client.report_backlog(lambda role: messages.Backlog(3, 3000))
            other.report_backlog(lambda role: messages.Backlog(4, 4000))
            await _reports(engines, {"r0": 7, "r1": 0})
            await other.aclose()
            await _reports(engines, {"r0": 3, "r1": 0})

    run_scenario(scenario())
