"""A process's client of the hub: it merges requests of the process's parts into one call through Serve.

Every call through a handle costs each of its two ends some milliseconds, and an ingress has several parts that
call the hub regularly. They all wait for the same beat, so they call together: once a second, and every other
second while the process has no request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

GATHER_S = 0.02
"""Seconds for which a call waits for others."""
PERIOD_S = 1.0
"""Seconds between two beats."""
IDLE_PERIOD_S = 2.0
"""The same while the process is idle: less than half of `deployments.hub.roster.ABSENT_S`, so that one call may be
lost."""


class HubCalls:
    """A handle of `MetricsHub` whose calls are gathered. Belongs to one event loop."""

    def __init__(self, hub: Any, is_idle: Callable[[], bool] = lambda: False) -> None:
        """`is_idle` returns whether the process has no request; it is asked once a second."""
        self._hub, self._is_idle = hub, is_idle
        self._next_beat: asyncio.Event | None = None
        self._waiting: list[tuple[str, tuple[Any, ...], asyncio.Future[Any]]] = []
        self._sent = set[asyncio.Task[None]]()

    async def beat(self) -> None:
        """Wait for the next moment at which this process's parts call the hub."""
        if self._next_beat is None:
            self._next_beat = asyncio.Event()
            asyncio.get_running_loop().call_later(PERIOD_S, self._strike)
        await self._next_beat.wait()

    def _strike(self, may_wait: bool = True) -> None:
        """End the wait for the beat, unless it may wait for longer and the process is idle."""
        if may_wait and self._is_idle():
            asyncio.get_running_loop().call_later(IDLE_PERIOD_S - PERIOD_S, self._strike, False)
        elif self._next_beat is not None:
            self._next_beat.set()
            self._next_beat = None

    def __getattr__(self, method: str) -> _Method:
        return _Method(lambda *args: self._call(method, args))

    def _call(self, method: str, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(GATHER_S, self._send)
        answer = loop.create_future()
        self._waiting.append((method, args, answer))
        return answer

    def _send(self) -> None:
        task = asyncio.create_task(self._ask(self._waiting))
        self._waiting = []
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)

    async def _ask(self, calls: list[tuple[str, tuple[Any, ...], asyncio.Future[Any]]]) -> None:
        answers: list[Any]
        try:
            answers = await self._hub.together.remote([(method, args) for method, args, _ in calls])
        except Exception as error:
            answers = [error] * len(calls)
        for (_, _, future), answer in zip(calls, answers, strict=True):
            if future.done():  # The caller no longer waits.
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


class _Method:
    """One method of the hub, called as one of a Serve handle."""

    def __init__(self, remote: Callable[..., Awaitable[Any]]) -> None:
        self.remote = remote
