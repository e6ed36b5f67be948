"""A watch tells of a death once, tries again after other ends, and asks for no replica that Serve has not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from deployments.client import replica_watch
from deployments.client.replica_watch import ReplicaDied, Watch
from tests.deployments.support.in_process_engines import until


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
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_watch, "RETRY_S", 0.001)


def test_a_death_is_told_once() -> None:
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
