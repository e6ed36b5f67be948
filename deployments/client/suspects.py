"""Which requests may have ended an engine, and how the one that did is found.

    a replica dies ─▶ what began there ─▶ goes on alone, where no other suspect runs ─ dies, too ─▶ is to blame
            │                 ▲
            │                 └─────────────────────── dies, too
            └─▶ what had run there for long ─▶ goes on beside others, at once
    each is cleared by CLEARED_TOKENS tokens more, or its end

An engine that a request ends mostly dies as it begins the request. What had run there for CLEARED_TOKENS tokens is
hardly suspect, then, and need not wait for a turn to run alone. If it ends a second engine, it had begun there.

One death proves nothing, as processes also die of what no request has done. An engine that then fails under the
only suspect there is taken for proof. A process that then vanishes without an error is not yet, as the processes
of a node vanish together; the one after it is. Requests that are no suspects run beside a trial, and migrate as
ever when it ends their replica. A replica refuses itself to try a request alone while it tries others, so
ingresses need not know each other's suspects; and it accepts such a request before its engine gets it, so a
replica that was dead already proves nothing either.
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
        """Record that a suspect is cleared or its attempt has ended: its place is free. Idempotent."""
        if self._replica_of.pop(attempt_id, None) is not None:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def free(self, replicas: Collection[str]) -> set[str]:
        """Return those of the replicas at which no suspect runs."""
        return set(replicas) - set(self._replica_of.values())

    async def change(self, timeout_s: float) -> None:
        """Wait until a suspect's place may be free, at most `timeout_s` seconds."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await asyncio.wait((future,), timeout=timeout_s)
