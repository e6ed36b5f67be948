"""The call that watches a replica: whatever ends it here ends it at the replica, before another is made."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from deployments.client import replica_watch
from deployments.client.replica_watch import ReplicaDied, Watch
from deployments.client.serve_watcher import ServeWatcher, WatchedReplica
from tests.deployments.support.in_process_engines import until


class Response:
    """What a handle's call returns: it ends as `end` says, or when it is cancelled."""

    def __init__(self, calls: list[str], number: int, end: Exception | None) -> None:
        self._calls, self._number, self._end = calls, number, end

    def __await__(self) -> Generator[Any, None, None]:
        if self._end is not None:
            raise self._end
        yield from asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        self._calls.append(f"cancel {self._number}")


class Handle:
    """A deployment's handle whose calls of `watch` end as the next of `ends` says; later ones stay open."""

    def __init__(self, *ends: Exception) -> None:
        self.calls: list[str] = []
        self._ends, self._num_made = list(ends), 0
        self.watch = self

    def remote(self, target: WatchedReplica, ingress_id: str) -> Response:
        number, self._num_made = self._num_made, self._num_made + 1
        self.calls.append(f"watch {target.watched_replica} for {ingress_id}")
        return Response(self.calls, number, self._ends.pop(0) if self._ends else None)


UNAVAILABLE = ActorUnavailableError("the network is slow", b"\0" * 16)


def test_a_call_that_fails_otherwise_than_by_a_death_is_cancelled_at_its_replica() -> None:
    handle = Handle(UNAVAILABLE)
    with pytest.raises(ActorUnavailableError):
        asyncio.run(ServeWatcher({"r0": handle}.__getitem__).watch("r0", "i"))
    assert handle.calls == ["watch r0 for i", "cancel 0"]


def test_a_death_is_reported_and_nothing_is_cancelled() -> None:
    handle = Handle(ActorDiedError())
    with pytest.raises(ReplicaDied):
        asyncio.run(ServeWatcher({"r0": handle}.__getitem__).watch("r0", "i"))
    assert handle.calls == ["watch r0 for i"]


def test_the_old_call_has_ended_before_the_next_begins_and_no_death_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_watch, "RETRY_S", 0.001)
    deaths: list[object] = []

    async def scenario() -> list[str]:
        handle = Handle(UNAVAILABLE, RuntimeError("Serve's controller is away"))
        watch = Watch(ServeWatcher({"r0": handle}.__getitem__), "r0", "i", lambda *death: deaths.append(death))
        await until(lambda: handle.calls.count("watch r0 for i") == 3)
        watch.close()
        await until(lambda: "cancel 2" in handle.calls)
        return handle.calls

    called = asyncio.run(scenario())
    assert called == ["watch r0 for i", "cancel 0", "watch r0 for i", "cancel 1", "watch r0 for i", "cancel 2"]
    assert deaths == []
