"""Which requests may have ended an engine, and how the one that did is found.

    a replica dies ─▶ all that it had is suspect ─▶ each goes on where no other suspect runs: its trial
                                                       ├─ CLEARED_TOKENS tokens, or its end ─▶ cleared
                                                       └─ that replica dies, too ─▶ the request is to blame

One death proves nothing, as processes also die of what no request has done. An engine that then fails under the
same suspect, the only one there, is taken for proof. A process that then vanishes without an error is not yet, as
the processes of a node vanish together; the one after it is. Requests that are no suspects run beside a trial, and
migrate as ever when it ends their replica. A replica refuses a second trial itself, so ingresses need not know
each other's suspects; and it accepts a trial before its engine gets it, so a replica that was dead already proves
nothing either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Literal

Blame = Literal["possible", "certain"]
"""Whether a request may have ended its replica, or must have."""
Trial = Literal["alone", "beside"]
"""How a suspect runs: where no other suspect does; or, after too long a wait for that, anywhere."""


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
