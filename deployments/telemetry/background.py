"""Work that repeats in the background of a process, such as its calls of the hub."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod


class Background(ABC):
    """A task on the running event loop, from `start` to `stop`."""

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """End. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    @abstractmethod
    async def _run(self) -> None:
        """Work without end."""
