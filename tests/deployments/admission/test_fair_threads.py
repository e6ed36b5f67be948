"""Threads that tenants share: nobody's work waits for another's but for its share, and nothing is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from deployments.admission.fair_threads import FairThreads


class Gate:
    """Work that is done when the test says so."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()

    def work(self) -> str:
        self.begun.set()
        assert self.opened.wait(60)
        return "done"


def play(
    num_threads: int,
    story: Callable[[FairThreads], Awaitable[None]],
    *,
    most_each: int | None = None,
    **options: float,
) -> None:
    """Play a story with a pool of its own."""

    async def main() -> None:
        threads = FairThreads(num_threads, "test", options, most_each=most_each)
        try:
            await story(threads)
        finally:
            threads.close()

    asyncio.run(main())


async def begun(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.begun.wait, 60)


def test_results_and_exceptions_come_back() -> None:
    def fail() -> None:
        raise KeyError("x")

    async def story(threads: FairThreads) -> None:
        assert await threads.run("a", lambda: threading.current_thread().name) == "test_0"
        with pytest.raises(KeyError):
            await threads.run("a", fail)
        assert await threads.run("a", lambda: 2) == 2

    play(2, story)


def test_the_last_idle_thread_is_not_for_a_tenant_that_has_one() -> None:
    """A tenant's flood takes all threads but one, where another's work is done at once."""

    async def story(threads: FairThreads) -> None:
        gates = [Gate() for _ in range(5)]
        flood = [asyncio.ensure_future(threads.run("a", gate.work)) for gate in gates]
        for gate in gates[:2]:
            await begun(gate)
        assert await threads.run("b", lambda: "at once") == "at once"
        assert not gates[2].begun.is_set() and threads.num_waiting("a") == 3
        for gate in gates:
            gate.opened.set()
        assert await asyncio.gather(*flood) == ["done"] * 5

    play(3, story)


def test_a_tenant_has_no_more_threads_at_a_time_than_it_may_have() -> None:
    async def story(threads: FairThreads) -> None:
        gates = [Gate() for _ in range(3)]
        flood = [asyncio.ensure_future(threads.run("a", gate.work)) for gate in gates]
        await begun(gates[0])
        for name in ("b", "c"):
            assert await threads.run(name, lambda: "at once") == "at once"
        assert not gates[1].begun.is_set() and threads.num_waiting("a") == 2
        for gate in gates:
            gate.opened.set()
        assert await asyncio.gather(*flood) == ["done"] * 3

    play(4, story, most_each=1)


def test_tenants_that_wait_take_turns() -> None:
    """Ten pieces of work of one tenant and ten of another, all of the same length: they alternate."""
    order: list[str] = []

    async def story(threads: FairThreads) -> None:
        first = Gate()
        waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(threads.run("c", first.work))]
        await begun(first)
        for tenant in "a" * 10 + "b" * 10:
            waiting.append(asyncio.ensure_future(threads.run(tenant, partial(order.append, tenant))))
        await asyncio.sleep(0)
        first.opened.set()
        await asyncio.gather(*waiting)

    ticks = iter(range(1000))
    threads = FairThreads(1, "test", clock=lambda: next(ticks) * 0.05)  # each piece takes 50 ms

    async def main() -> None:
        await story(threads)
        threads.close()

    asyncio.run(main())
    assert sorted(order[:10]) == ["a"] * 5 + ["b"] * 5
    assert sorted(order) == ["a"] * 10 + ["b"] * 10


def test_work_whose_client_has_left_is_not_done() -> None:
    async def story(threads: FairThreads) -> None:
        gate, done = Gate(), []
        running = asyncio.ensure_future(threads.run("a", gate.work))
        await begun(gate)
        left = asyncio.ensure_future(threads.run("a", lambda: done.append("left")))
        stays = asyncio.ensure_future(threads.run("a", lambda: done.append("stays")))
        await asyncio.sleep(0)
        left.cancel()
        running.cancel()  # its thread goes on, and is free afterwards
        await asyncio.sleep(0)
        gate.opened.set()
        await stays
        assert done == ["stays"] and threads.num_waiting("a") == 0

    play(1, story)


def test_closing_cancels_waiting_work() -> None:
    async def story(threads: FairThreads) -> None:
        gate = Gate()
        running = asyncio.ensure_future(threads.run("a", gate.work))
        await begun(gate)
        waiting = asyncio.ensure_future(threads.run("a", lambda: 1))
        await asyncio.sleep(0)
        threads.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.opened.set()
        assert await running == "done"

    play(1, story)
