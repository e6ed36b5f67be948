"""The hub as a deployment: every process pushes its numbers here, every ingress reads the page.

It is also where ingresses tell which prefixes are worth most, and where new replicas ask for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from deployments.warm_up import Post, WarmUpBoard
from monitoring.hub import CONTENT_TYPE, Hub
from router.hot_prefixes import HotPrefix

PUSH_PERIOD_S = 1.0


class MetricsHub:
    """One replica holds the numbers of the whole application."""

    def __init__(self) -> None:
        self._hub = Hub()
        self._board = WarmUpBoard()

    async def push(self, process: str, snapshot: bytes) -> None:
        """Take a process's snapshot."""
        self._hub.push(process, snapshot, time.monotonic())

    async def render(self) -> tuple[bytes, str]:
        """The page and its content type."""
        return self._hub.render(time.monotonic()), CONTENT_TYPE

    async def post_prefixes(self, ingress: str, post: Post) -> None:
        """Take what an ingress knows of a model's prompts."""
        self._board.post(ingress, post, time.monotonic())

    async def hot_prefixes(self, model: str, max_tokens: int) -> list[HotPrefix]:
        """The prefixes of a model worth most, of at most `max_tokens` together."""
        return self._board.top(model, max_tokens, time.monotonic())


class MetricsPusher:
    """Pushes one process's numbers once a second. A hub that is away costs nothing but fresh numbers."""

    def __init__(self, hub: Any, process: str, snapshot: Callable[[], bytes]) -> None:
        self._hub, self._process, self._snapshot = hub, process, snapshot
        self.num_failed = 0
        """Pushes that did not arrive."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._task = asyncio.create_task(self._push_forever())

    def stop(self) -> None:
        """End. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _push_forever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(5 * PUSH_PERIOD_S):
                    await self._hub.push.remote(self._process, self._snapshot())
            except Exception:
                self.num_failed += 1
            await asyncio.sleep(PUSH_PERIOD_S)


async def read_page(hub: Any, timeout_s: float = 5.0) -> tuple[bytes, str]:
    """The hub's page; an empty one that says why when the hub does not answer."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(timeout_s):
            body, content_type = await hub.render.remote()
            return body, content_type
    return b"# the metrics hub does not answer\n", CONTENT_TYPE
