"""The hub as an ingress calls it: what its parts ask for at about the same time is one call through Serve.

A call through a handle costs its two ends some milliseconds, whatever it does, and an ingress has several parts
that call the hub once a second each. Answers to one call come together, so the parts then call together again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

GATHER_S = 0.02
"""Seconds for which a call waits for others."""


class HubCalls:
    """A handle of `MetricsHub` whose calls are gathered. Belongs to one event loop."""

    def __init__(self, hub: Any) -> None:
        self._hub = hub
        self._waiting: list[tuple[str, tuple[Any, ...], asyncio.Future[Any]]] = []
        self._sent = set[asyncio.Task[None]]()

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
            if future.done():  # whoever asked has given up
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


class _Method:
    """One method of the hub, called as one of a Serve handle."""

    def __init__(self, remote: Callable[..., Awaitable[Any]]) -> None:
        self.remote = remote
