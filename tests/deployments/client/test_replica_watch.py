"""A watch tells of a death once, tries again after other ends, and asks for no replica that Serve has not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import pytest
from ray.exceptions import ActorUnavailableError

from deployments.client import replica_watch
from deployments.client.replica_watch import ReplicaDied, Watch
from deployments.wire.connection import WireConnection
from deployments.wire.messages import Generate, ToIngress, Welcome
from tests.deployments.support.in_process_engines import ClientAndEngines, request, until
from tests.deployments.support.time_limit import run_scenario


class Calls:
    """Ends each call as the next of `ends` says; the calls after them stay open."""

    def __init__(self, *ends: Exception | None) -> None:
        self._ends = list(ends)
        self.num_calls = self.num_open = 0

    async def watch(self, replica: str, ingress_id: str) -> None:
        self.num_calls += 1
        if self._ends:
            end = self._ends.pop(0)
            if end is not None:
                raise end
            return
        self.num_open += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_open -= 1


def watched(calls: Calls, died: list[str], is_member: Callable[[], bool] = lambda: True) -> Watch:
    return Watch(
        calls, "r0", "i", lambda replica, loss, reason: died.append(f"{replica} {loss}: {reason}"), is_member
    )


@pytest.fixture(autouse=True)
def _retries_are_immediate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_watch, "RETRY_S", 0.001)


def test_a_death_is_reported_once() -> None:
    async def scenario() -> None:
        calls, died = Calls(ReplicaDied("gone")), list[str]()
        watched(calls, died)
        await until(lambda: bool(died))
        await asyncio.sleep(0.05)
        assert (died, calls.num_calls) == (["r0 died: gone"], 1)

    asyncio.run(scenario())


def test_a_call_that_ends_or_fails_is_made_again_and_its_failures_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        calls, died = Calls(None, RuntimeError("away"), RuntimeError("away")), list[str]()
        watch = watched(calls, died)
        await until(lambda: calls.num_open == 1)
        watch.close()
        await until(lambda: calls.num_open == 0)
        assert (calls.num_calls, died) == (4, [])

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert caplog.text.count("the watch of replica r0 failed") == 1


def test_a_replica_that_serve_no_longer_has_is_not_asked_for() -> None:
    async def scenario() -> None:
        calls, is_member = Calls(), asyncio.Event()
        watch = watched(calls, [], is_member.is_set)
        await asyncio.sleep(0.05)
        assert calls.num_calls == 0
        is_member.set()
        await until(lambda: calls.num_open == 1)
        watch.close()

    asyncio.run(scenario())


class ScriptedWatcher:
    """Watches of real engines: those of r0 end with `ends`, one after the other, and then stay open."""

    def __init__(self, *ends: Exception) -> None:
        self._ends = list(ends)
        self.go = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return not self._ends

    async def watch(self, replica: str, ingress_id: str) -> None:
        await self.go.wait()
        if replica == "r0" and self._ends:
            raise self._ends.pop(0)
        await asyncio.Event().wait()


def test_streams_stay_where_they_are_while_a_watch_fails_otherwise_than_by_a_death() -> None:
    async def scenario() -> None:
        watcher = ScriptedWatcher(ActorUnavailableError("the network is slow", b"\0" * 16), RuntimeError("away"))
        async with ClientAndEngines(2, watcher=watcher) as (client, engines):
            engines.runners[0].gate.clear()
            stream = await asyncio.create_task(client.generate(request("a", max_tokens=20)))
            watcher.go.set()
            await until(lambda: watcher.has_ended)
            engines.runners[0].gate.set()
            assert [token async for delta in stream for token in delta.token_ids] == list(range(1, 21))
            assert (stream.replica, engines.calls, stream.timeline.migrations) == ("r0", ["r0"], [])

    run_scenario(scenario())


def test_a_live_replica_that_was_reported_dead_is_told_to_stop_before_another_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[str, str, str]] = []
    abort, generate = WireConnection.abort, WireConnection.generate

    def noted_abort(self: WireConnection, request_id: str) -> None:
        sent.append(("abort", self.address.replica, request_id))
        abort(self, request_id)

    def noted_generate(self: WireConnection, message: Generate) -> bool:
        sent.append(("generate", self.address.replica, message.request_id))
        return generate(self, message)

    monkeypatch.setattr(WireConnection, "abort", noted_abort)
    monkeypatch.setattr(WireConnection, "generate", noted_generate)

    async def scenario() -> None:
        watcher = ScriptedWatcher(ReplicaDied("its process died"))
        async with ClientAndEngines(2, watcher=watcher, health={"lost_after_s": 600}) as (client, engines):
            engines.runners[0].step_s = 0.01
            stream = await client.generate(request("a", max_tokens=200))
            first = await anext(stream)
            watcher.go.set()
            rest = [token async for delta in stream for token in delta.token_ids]
            assert [*first.token_ids, *rest] == list(range(1, 201))
            assert stream.replica == "r1"
            await until(lambda: not engines.replicas[0].engine.loop.has_work)  # it did not decode to the end

    run_scenario(scenario())
    order = [sent.index(one) for one in [("generate", "r0", "a"), ("abort", "r0", "a"), ("generate", "r1", "a~1")]]
    assert order == sorted(order)


def test_only_an_answer_brings_back_a_replica_that_was_reported_dead() -> None:
    """Messages may still be on their way when its process is gone: a request sent there would wait for silence.
    But a replica that answers lives, whatever the control plane says.
    """

    async def scenario() -> None:
        watcher = ScriptedWatcher(ReplicaDied("gone"))
        async with ClientAndEngines(2, watcher=watcher) as (client, engines):
            await until(lambda: client.num_synced == 2)
            num_heard = 0

            def lose_welcomes(message: ToIngress) -> Iterable[ToIngress]:
                nonlocal num_heard
                num_heard += not isinstance(message, Welcome)
                return () if isinstance(message, Welcome) else (message,)

            engines.links["r0"].to_ingress = lose_welcomes
            watcher.go.set()
            await until(lambda: client.reachable() == {"r1"})
            num_heard = 0
            await until(lambda: num_heard > 5)
            assert client.reachable() == {"r1"}
            engines.speak(0)
            await until(lambda: client.reachable() == {"r0", "r1"})

    run_scenario(scenario())
