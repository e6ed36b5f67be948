"""Finds resumable streams: asks all replicas that know them, and joins their answers.

find ── Find ──▶ each replica that answers
                 Found ◀── its requests of the stream, perhaps none
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from deployments.client.protocol import FoundPart, FoundStream
from deployments.wire.connection import WireConnection
from deployments.wire.deadlines.deadline import awake_now
from deployments.wire.deadlines.time_limit import timeout
from deployments.wire.messages import Found, StreamPart

REPEAT_S = 1.0
"""Seconds after which a replica that has not answered is asked again: the message may be lost."""
SOON_S = 0.05
"""The same while a replica has not answered at all, because the connection is new."""
FIND_S = 5.0
"""Longest search. A replica that was silent for so long is lost, or has too much to do to continue a stream."""


class StreamFinder:
    """Asks the replicas of one model. Lives on one event loop."""

    def __init__(self, connections: Mapping[str, WireConnection]) -> None:
        """`connections` are those to all replicas, which change."""
        self._connections = connections
        self._searches: dict[tuple[str, str], list[_Search]] = {}

    async def find(self, name: str, tenant: str) -> FoundStream | None:
        """Return a tenant's stream with this name; None if no replica that answers has it."""
        search, searches = _Search(), self._searches.setdefault((name, tenant), [])
        searches.append(search)
        try:
            return await self._search(name, tenant, search)
        finally:
            searches.remove(search)
            if not searches:
                del self._searches[name, tenant]

    def on_found(self, replica: str, message: Found) -> None:
        """Take a replica's answer. It may be late."""
        for search in self._searches.get((message.name, message.tenant), ()):
            search.answers[replica] = message
            search.news.set()

    async def _search(self, name: str, tenant: str, search: _Search) -> FoundStream | None:
        end, repeat_at = awake_now() + FIND_S, 0.0
        while silent := self._asked() - search.answers.keys():
            now = awake_now()
            if now >= end:
                break
            if now >= repeat_at:
                is_known = all(self._connections[replica].keeps_streams for replica in silent)
                repeat_at = now + (REPEAT_S if is_known else SOON_S)
                for replica in silent:
                    if self._connections[replica].keeps_streams:
                        self._connections[replica].find(name, tenant)
            search.news.clear()
            with contextlib.suppress(TimeoutError), timeout(min(repeat_at, end) - now):
                await search.news.wait()
        return search.result()

    def _asked(self) -> set[str]:
        """Return the replicas that may have streams."""
        return {
            replica
            for replica, connection in self._connections.items()
            if not connection.is_lost and connection.keeps_streams is not False
        }


class _Search:
    def __init__(self) -> None:
        self.answers: dict[str, Found] = {}
        self.news = asyncio.Event()

    def result(self) -> FoundStream | None:
        """Return what was found. Of several attempts at a request, the one that got furthest counts."""
        having = [found for found in self.answers.values() if found.parts]
        if not having:
            return None
        parts: dict[int, FoundPart] = {}
        for replica, found in self.answers.items():
            for part in found.parts:
                if part.index not in parts or _rank(part) > _rank(parts[part.index].part):
                    parts[part.index] = FoundPart(replica, part)
        return FoundStream(having[0].record, parts)


def _rank(part: StreamPart) -> tuple[bool, int]:
    return part.finish_reason not in ("abort", "error"), part.num_tokens
