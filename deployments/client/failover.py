"""A stream on its way through replicas: retries before its first token, migrations after it, and hedging.

attempt ─ ended ──────────────────────────────────────────▶ done
    ├─ refused (full, draining) ─▶ another replica ... ──▶ Overloaded when all are full
    ├─ lost before the first token ─▶ another, at most `max_retries` times ──▶ Unavailable
    └─ lost after it ─▶ journal's tokens to another, at most `max_migrations` times ──▶ ReplicaLost
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deployments.client.attempt import Attempt, Desk, Setback
from deployments.client.protocol import Overloaded, Rejected, ReplicaLost, Unavailable
from deployments.client.stream import Stream
from deployments.client.timeline import Migration
from monitoring.metrics import Metrics

logger = logging.getLogger("ray.serve")

MAX_OFFERS = 4
"""Replicas that a new request is offered to, full queues included."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Persistence:
    """How hard a request is tried."""

    max_retries: int = 2
    """Replicas that may be lost before a stream's first token."""
    max_migrations: int = 3
    """Replicas that may be lost after it."""
    migration_wait_s: float = 30.0
    """How long a broken stream waits for a replica with room, in seconds."""
    hedge_after_s: float | None = None
    """Seconds without a first token after which a second replica is asked too; None: never."""
    hedge_share: float = 0.05
    """Most requests of which that is done, as a share of all."""


class HedgeBudget:
    """Lets a share of requests be asked for twice; unused budget is kept for at most ten of them."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit = 1.0

    def earn(self) -> None:
        """A request came."""
        self._credit = min(self._credit + self._share, 10.0)

    def take(self) -> bool:
        """Whether one more may be hedged now; it is, then."""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True


class Delivery:
    """Brings one stream to its end, whatever happens to replicas."""

    def __init__(
        self, desk: Desk, stream: Stream, persistence: Persistence, hedges: HedgeBudget, metrics: Metrics | None
    ) -> None:
        self._desk, self._stream = desk, stream
        self._persistence, self._hedges, self._metrics = persistence, hedges, metrics
        self._avoid: list[str] = []
        self._num_attempts = self._num_losses = 0
        self._retry_after: list[float] = []
        self._deadline: float | None = None  # of the migration that is under way
        self._migrating: Setback | None = None

    async def run(self) -> None:
        """Return when the stream has ended or failed."""
        self._hedges.earn()
        while not self._stream.ended.is_set():
            setback = await self._attempt()
            if setback is None or self._stream.ended.is_set():
                return
            error = await self._recover(setback)
            if error is not None:
                return self._stream.fail(error)

    # --- one attempt, or two ---------------------------------------------------------------------------------

    async def _attempt(self) -> Setback | None:
        first = self._next()
        watch = None
        if self._migrating is not None:
            watch = asyncio.ensure_future(self._record_resumption(first, self._migrating))
        try:
            if self._persistence.hedge_after_s is None or len(self._stream.journal):
                return await first.run()
            return await self._hedged(first, self._persistence.hedge_after_s)
        finally:
            if watch is not None and not first.began.done():
                watch.cancel()

    def _next(self) -> Attempt:
        attempt = Attempt(self._desk, self._stream, self._num_attempts, tuple(self._avoid))
        self._num_attempts += 1
        return attempt

    async def _hedged(self, first: Attempt, patience: float) -> Setback | None:
        """Ask a second replica when the first says nothing for `patience` seconds; the first token decides."""
        running = {asyncio.ensure_future(first.run()): first}
        try:
            waited: list[asyncio.Future[Any]] = [*running, first.began]
            await asyncio.wait(waited, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            silent = first.replica or self._desk.fleet.placement(first.wire_id)
            if any(task.done() for task in running) or first.began.done() or not self._others(silent):
                return await next(iter(running))
            if not self._hedges.take():
                self._count("hedges_total", outcome="over_budget")
                return await next(iter(running))
            self._avoid.append(silent or "?")
            second = self._next()
            running[asyncio.ensure_future(second.run())] = second
            return await self._first_of(running, first)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _first_of(
        self, running: dict[asyncio.Task[Setback | None], Attempt], first: Attempt
    ) -> Setback | None:
        setback: Setback | None = None
        while running:
            waited: list[asyncio.Future[Any]] = [*running, *(attempt.began for attempt in running.values())]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            winner = next((task for task, attempt in running.items() if attempt.began.done()), None)
            if winner is not None:
                self._count("hedges_total", outcome="lost" if running[winner] is first else "won")
                for task, attempt in running.items():
                    if task is not winner:
                        attempt.is_muted = True
                        task.cancel()
                return await winner
            for task in [task for task in running if task.done()]:
                setback = task.result()
                del running[task]
        return setback

    # --- after a setback -----------------------------------------------------------------------------------

    async def _recover(self, setback: Setback) -> Exception | None:
        """None to try again; else what the client is told."""
        self._avoid.append(setback.replica or "?")
        has_tokens = len(self._stream.journal) > 0
        if setback.kind == "never_fits":
            return self._give_up(setback) if has_tokens else Rejected(setback.reason)
        if setback.kind != "lost":
            return await self._find_room(setback) if has_tokens else self._offer_elsewhere(setback)
        self._num_losses += 1
        logger.warning(
            "%s lost its replica %s after %d tokens: %s",
            self._stream.request.request_id,
            setback.replica,
            len(self._stream.journal),
            setback.reason,
        )
        if not has_tokens:
            if self._num_losses > self._persistence.max_retries or len(self._avoid) >= MAX_OFFERS:
                return Unavailable(f"the engine was lost: {setback.reason}")
            self._count("retries_total", reason=setback.loss or "failed")
            return None
        return await self._migrate(setback)

    def _offer_elsewhere(self, setback: Setback) -> Exception | None:
        if setback.kind == "queue_full":
            self._retry_after.append(setback.retry_after_s)
        if len(self._avoid) < MAX_OFFERS and self._others():
            return None
        if self._retry_after:
            return Overloaded("every engine's queue is full", min(self._retry_after))
        return Unavailable(setback.reason)

    async def _migrate(self, setback: Setback) -> Exception | None:
        migrations = self._stream.course.migrations
        migrations.append(Migration(time.monotonic(), setback.replica, setback.loss or "failed"))
        is_new = self._migrating is None
        self._migrating = self._migrating or setback
        if len(migrations) > self._persistence.max_migrations:
            return self._give_up(setback)
        if is_new:
            self._deadline = time.monotonic() + self._persistence.migration_wait_s
        return None if await self._until(lambda: bool(self._others())) else self._give_up(setback, "no_replica")

    async def _find_room(self, setback: Setback) -> Exception | None:
        """A stream that has begun waits for room instead of being refused."""
        if self._others():
            return None
        await asyncio.sleep(_POLL_S)
        self._avoid.clear()
        if self._deadline is not None and time.monotonic() < self._deadline:
            return None
        return self._give_up(setback, "no_replica")

    async def _until(self, condition: Callable[[], bool]) -> bool:
        while not condition():
            if self._deadline is None or time.monotonic() > self._deadline:
                return False
            await asyncio.sleep(_POLL_S)
            # What was lost may be back, under the same name after a pause or a cut.
            self._avoid.clear()
        return True

    def _others(self, besides: str | None = None) -> set[str]:
        """Replicas that answer and were not tried yet."""
        fleet = self._desk.fleet
        return fleet.addresses().keys() - fleet.lost() - {*self._avoid, besides or "?"}

    def _give_up(self, setback: Setback, outcome: str = "gave_up") -> Exception:
        self._count("migrations_total", reason=(self._migrating or setback).loss or "failed", outcome=outcome)
        return ReplicaLost(setback.replica or "?", setback.reason)

    async def _record_resumption(self, attempt: Attempt, setback: Setback) -> None:
        """The first token of a resumed stream: the client's gap ends here."""
        before = self._stream.journal.last_token_at
        await attempt.began
        self._migrating = None
        self._avoid.clear()
        self._count("migrations_total", reason=setback.loss or "failed", outcome="resumed")
        if self._metrics is not None and before is not None:
            self._metrics.observe("migration_gap_seconds", time.monotonic() - before)

    def _count(self, name: str, **labels: str) -> None:
        if self._metrics is not None:
            self._metrics.inc(name, 1.0, **labels)
