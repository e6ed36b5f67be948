"""Requests that may have ended an engine, and the search for the one that did.

    a replica dies ─▶ requests that began there ─▶ each resumes where no other suspect runs ─ dies, too ─▶ guilty
            │                 ▲
            │                 └────────────────────────────── dies, too
            └─▶ requests that had run there for long ─▶ resume next to others, immediately
    each is cleared by CLEARED_TOKENS tokens more, or its end

An engine that a request ends mostly dies as it begins the request. So a request that had run there for
CLEARED_TOKENS tokens is hardly suspect, and need not wait for a turn of its own. If it ends a second engine, it
had begun there.

One death proves nothing, because processes also die of other causes. An engine that then fails under its only
suspect counts as proof. A process that then vanishes without an error is no proof yet, because the processes of a
node vanish together; the next one is. Requests that are no suspects run next to a trial, and migrate as usual when
it ends their replica. A replica itself refuses to try a request by itself while it tries others, so ingresses need
not know each other's suspects; and it accepts such a request before its engine receives it, so a replica that was
dead already proves nothing either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Literal

Blame = Literal["unlikely", "possible", "certain"]
"""Whether a request has ended its replica: hardly, as it had run there for long; perhaps, as it began; surely."""


class Suspects:
    """The suspects of one ingress that were sent to replicas and are not cleared. Lives on one event loop."""

    def __init__(self) -> None:
        self._replica_of: dict[str, str] = {}
        self._waiting: list[asyncio.Future[None]] = []

    def place(self, attempt_id: str, replica: str) -> None:
        """Record that a suspect is sent to a replica."""
        self._replica_of[attempt_id] = replica

    def remove(self, attempt_id: str) -> None:
        """Record that a suspect is cleared or its attempt has ended, which frees its place. Idempotent."""
        if self._replica_of.pop(attempt_id, None) is not None:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def free(self, replicas: Collection[str]) -> set[str]:
        """Return those of the replicas where no suspect runs."""
        return set(replicas) - set(self._replica_of.values())

    async def change(self, timeout_s: float) -> None:
        """Wait until a suspect's place may be free, at most `timeout_s` seconds."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await asyncio.wait((future,), timeout=timeout_s)
