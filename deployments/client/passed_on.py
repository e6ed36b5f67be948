"""A generation on its way through a layer between the API and the engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from deployments.client.protocol import Generation
from deployments.client.timeline import Course
from engine.stream_delta import StreamDelta


class PassedOn:
    """Another generation as it is; a layer overrides what it wants to see or change."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    @property
    def replica(self) -> str | None:
        """Id of the replica that generates it."""
        return self._generation.replica

    @property
    def course(self) -> Course:
        """Where it was, and when."""
        return self._generation.course

    def explain(self) -> dict[str, Any] | None:
        """Why there."""
        return self._generation.explain()

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        return self

    async def __anext__(self) -> StreamDelta:
        """The next event."""
        return await self._generation.__anext__()

    async def aclose(self) -> None:
        """Abort in the engine when not finished."""
        await self._generation.aclose()
