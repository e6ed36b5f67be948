"""Failover of one stream: retries before its first token, migrations after it, and hedging.

attempt ─ ended ──────────────────────────────────────────▶ done
    ├─ refused (full, draining) ─▶ another replica ... ──▶ Overloaded when all are full
    ├─ no replica is there ─▶ the next one, `migration_wait_s` at most ──▶ Unavailable, ReplicaLost
    ├─ lost before the first token ─▶ another, at most `max_retries` times ──▶ Unavailable
    ├─ lost after it ─▶ journal's tokens to another, at most `max_migrations` times ──▶ ReplicaLost
    └─ lost by its own fault (`deployments/client/suspects.py`) ──▶ EndsEngines, FailsSteps
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from deployments.client.attempt import Attempt, DispatchContext
from deployments.client.attempt_failure import AttemptFailure
from deployments.client.outgoing import sending_cost
from deployments.client.protocol import EndsEngines, FailsSteps, Overloaded, Rejected, ReplicaLost, Unavailable
from deployments.client.stream import Stream
from deployments.client.suspects import Blame
from deployments.client.timeline import Migration
from deployments.config.settings import HealthSettings
from deployments.wire.deadlines.deadline import awake_now
from deployments.wire.deadlines.time_limit import timeout
from deployments.wire.messages import Trial
from monitoring.metrics import Metrics

logger = logging.getLogger("ray.serve")

MAX_OFFERS = 4
"""Most replicas that receive an offer of a new request, including those with full queues."""
HEAD_START_S = 0.2
"""Time between a replica's death and the first suspect that runs by itself: by then the others, also those of
other ingresses, have arrived at the replicas where they resume."""
_POLL_S = 0.05


class HedgeBudget:
    """Allows a share of requests to be sent twice; unused budget accumulates up to ten hedges."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit = 1.0

    def earn(self) -> None:
        """Add one request's share to the budget."""
        self._credit = min(self._credit + self._share, 10.0)

    def take(self) -> bool:
        """Spend the budget of one hedge. Return False if there is too little."""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True


class Failover:
    """Runs one stream to its end, with as many attempts as the limits allow."""

    def __init__(
        self,
        dispatch: DispatchContext,
        stream: Stream,
        health: HealthSettings,
        hedges: HedgeBudget,
        metrics: Metrics | None,
        runs_at: str | None = None,
        number: int = 0,
    ) -> None:
        """`health` limits the number of retries and migrations, and the time spent on one. `runs_at` is the
        replica that already runs an attempt for another reader, the one of this `number`.
        """
        self._dispatch, self._stream = dispatch, stream
        self._health, self._hedges, self._metrics = health, hedges, metrics
        self._avoid: list[str] = []
        self._closed: list[str] = []  # replicas that accept nothing more: stopping, or ended
        self._num_attempts, self._runs_at, self._num_losses = number, runs_at, 0
        self._retry_after: list[float] = []
        self._deadline: float | None = None  # for the current migration, or the wait for a first replica
        self._migrating: AttemptFailure | None = None
        self._blame: Blame | None = None  # blame for the last death; None: no suspect
        self._num_dead = 0  # replicas that died in a row while running it
        self._died_at = 0.0  # when the last of them died

    def begin(self) -> Attempt:
        """Send the first attempt, in the task that planned the request: none has to wait for others' planning."""
        self._hedges.earn()
        attempt = self._next()
        attempt.send()
        return attempt

    async def run(self, attempt: Attempt) -> None:
        """Run the first attempt, and others until the stream has ended or failed."""
        while True:
            failure = await self._attempt(attempt)
            if failure is None:
                return self._clear()
            if self._stream.has_ended:
                return None
            error = await self._recover(failure)
            if error is not None:
                return self._stream.fail(error)
            await self._take_turn()
            if self._stream.has_ended:
                return None
            attempt = self._next(await self._trial())

    async def _take_turn(self) -> None:
        """Yield to the event loop between many streams that resume elsewhere at the same time."""
        turns = self._dispatch.resumptions
        while turns.is_spent:
            await asyncio.sleep(0)
        turns.spend(sending_cost(len(self._stream.request.prompt_ids) + self._stream.journal.num_tokens))

    # --- one attempt, or two ---------------------------------------------------------------------------------

    async def _attempt(self, first: Attempt) -> AttemptFailure | None:
        watch = None
        if self._migrating is not None:
            watch = asyncio.ensure_future(self._record_resumption(first, self._migrating))
        try:
            has_begun = first.runs_at is not None or self._stream.journal.num_tokens > 0
            if self._health.hedge_after_s is None or has_begun or first.trial is not None:
                return await first.run()
            return await self._hedged(first, self._health.hedge_after_s)
        finally:
            if watch is not None and not first.began.done():
                watch.cancel()

    def _next(self, trial: Trial | None = None) -> Attempt:
        attempt = Attempt(
            self._dispatch,
            self._stream,
            self._num_attempts,
            tuple(self._avoid),
            trial,
            self._clear,
            self._migrating,
            self._runs_at,
        )
        self._num_attempts += 1
        self._runs_at = None
        return attempt

    async def _hedged(self, first: Attempt, patience: float) -> AttemptFailure | None:
        """Ask a second replica when the first sends nothing for `patience` seconds; the first token decides."""
        running = {asyncio.ensure_future(first.run()): first}
        try:
            waited: list[asyncio.Future[Any]] = [*running, first.began]
            with contextlib.suppress(TimeoutError), timeout(patience):
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            silent = first.placed
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
        self, running: dict[asyncio.Task[AttemptFailure | None], Attempt], first: Attempt
    ) -> AttemptFailure | None:
        failure: AttemptFailure | None = None
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
                failure = task.result()
                del running[task]
        return failure

    # --- after a failure -----------------------------------------------------------------------------------

    async def _recover(self, failure: AttemptFailure) -> Exception | None:
        """Return None to try again, else the error for the client."""
        self._avoid.append(failure.replica or "?")
        if failure.loss == "handed_over":
            self._migrating, self._deadline = failure, awake_now() + self._health.migration_wait_s
            return None
        has_tokens = self._stream.journal.num_tokens > 0
        if failure.kind == "never_fits":
            return self._give_up(failure) if has_tokens else Rejected(failure.reason)
        if failure.kind == "absent":
            return await self._wait_for_replica(failure)
        if failure.kind != "lost":
            if failure.kind == "queue_full" and self._may_wait_for_trial():
                await self._ask_again()
                return None
            return await self._find_room(failure) if has_tokens else await self._offer_elsewhere(failure)
        if self._is_to_blame(failure):
            return self._end(failure)
        self._num_losses += 1
        logger.log(
            logging.INFO if failure.loss == "drained" else logging.WARNING,
            "%s lost its replica %s after %d tokens: %s",
            self._stream.request.request_id,
            failure.replica,
            self._stream.journal.num_tokens,
            failure.reason,
        )
        if not has_tokens:
            if self._num_losses > self._health.max_retries or len(self._avoid) >= MAX_OFFERS:
                return Unavailable(f"the engine was lost (health.max_retries): {failure.reason}")
            self._count("retries_total", reason=failure.loss or "failed")
            self._deadline = None  # A replica has run it since its wait.
            return None
        return await self._migrate(failure)

    # --- suspects --------------------------------------------------------------------------------------------

    def _is_to_blame(self, failure: AttemptFailure) -> bool:
        """Suspect a request whose replica died. Return whether it has ended as many as one request may."""
        if failure.blame is None:
            return False
        self._blame, self._died_at = failure.blame, awake_now()
        self._num_dead += 1
        may_be_chance = failure.loss == "died"  # perhaps together with its whole node
        enough = 1 + self._health.max_lost_replicas_per_request + may_be_chance
        return failure.blame == "certain" and self._num_dead >= enough

    async def _trial(self) -> Trial | None:
        """Return how a suspect runs; wait until one that must run by itself can. The wait is limited, because most
        suspects are innocent, and many suspects are no reason to refuse them: they then run together.
        """
        if self._blame is None:
            return None
        if self._blame == "unlikely":
            return "beside"
        began = awake_now()
        await asyncio.sleep(self._died_at + HEAD_START_S - began)
        trial: Trial = "alone"
        while (others := self._others()) and not self._dispatch.suspects.free(others):
            left_s = self._exclusive_until - awake_now()
            if left_s <= 0:
                trial = "beside"
                break
            await self._dispatch.suspects.change(min(left_s, _POLL_S))
            self._avoid.clear()
        if self._deadline is not None:  # Waiting for a turn does not count as waiting for room.
            self._deadline += awake_now() - began
        return trial

    @property
    def _exclusive_until(self) -> float:
        """Return when a suspect has waited long enough for a place where no other runs."""
        return self._died_at + self._health.migration_wait_s

    def _may_wait_for_trial(self) -> bool:
        return self._blame in ("possible", "certain") and awake_now() < self._exclusive_until

    async def _ask_again(self) -> None:
        """Wait a moment, because the replica is full, or runs another ingress's suspect."""
        await asyncio.sleep(_POLL_S)
        self._avoid.clear()

    def _clear(self) -> None:
        """Clear the request of suspicion."""
        if self._blame is not None:
            self._blame, self._num_dead = None, 0
            self._count("suspects_total", outcome="cleared")

    def _end(self, failure: AttemptFailure) -> Exception:
        """End a request that ends engines."""
        kind = FailsSteps if failure.loss == "step_failed" else EndsEngines
        error = kind(self._num_dead)
        logger.error("%s is ended: %s", self._stream.request.request_id, error)
        self._count("suspects_total", outcome="ended")
        if self._stream.journal.num_tokens:
            self._give_up(failure)
        return error

    # --- other replicas --------------------------------------------------------------------------------------

    async def _offer_elsewhere(self, failure: AttemptFailure) -> Exception | None:
        if failure.kind in ("draining", "stopped") and failure.replica is not None:
            self._closed.append(failure.replica)
        if failure.kind == "queue_full":
            self._retry_after.append(failure.retry_after_s)
        if len(self._avoid) < MAX_OFFERS and self._others():
            return None
        if self._retry_after:
            reason = "every engine's queue is full (engine.max_waiting, engine.max_waiting_tokens)"
            return Overloaded(reason, min(self._retry_after))
        return await self._wait_for_replica(failure)

    async def _wait_for_replica(self, failure: AttemptFailure) -> Exception | None:
        """Wait for a first replica, as begun streams do. Its absence does not count as a loss."""
        longest = self._health.migration_wait_s
        if self._deadline is None:
            self._deadline = awake_now() + min(longest, self._stream.request.max_wait_s or longest)
        if await self._until(lambda: bool(self._others())):
            return None
        if self._stream.journal.num_tokens:
            return self._give_up(failure, "no_replica")
        return Unavailable(failure.reason)

    async def _migrate(self, failure: AttemptFailure) -> Exception | None:
        migrations = self._stream.timeline.migrations
        migrations.append(Migration(time.monotonic(), failure.replica, failure.loss or "failed"))
        is_new = self._migrating is None
        self._migrating = self._migrating or failure
        # A failed step ends no replica, one that is stopped is not lost, and a cleared suspect ended none.
        num_lost = sum(one.reason not in ("step_failed", "drained") for one in migrations)
        if num_lost + self._num_dead * (failure.loss == "step_failed") > self._health.max_migrations:
            return self._give_up(failure)
        if is_new:
            self._deadline = awake_now() + self._health.migration_wait_s
        return None if await self._until(lambda: bool(self._others())) else self._give_up(failure, "no_replica")

    async def _find_room(self, failure: AttemptFailure) -> Exception | None:
        """Wait for room in a queue, because a stream that has begun is not refused."""
        if self._others():
            return None
        await asyncio.sleep(_POLL_S)
        self._avoid.clear()
        if self._deadline is not None and awake_now() < self._deadline:
            return None
        return self._give_up(failure, "no_replica")

    async def _until(self, condition: Callable[[], bool]) -> bool:
        has_tokens = self._stream.journal.num_tokens > 0
        while not condition():
            if self._deadline is None or awake_now() > self._deadline:
                return False
            if not has_tokens and not self._dispatch.expects_engines:
                return False
            await asyncio.sleep(_POLL_S)
            # A lost replica may be back under the same name after a pause or a network partition.
            self._avoid[:] = self._closed
        return True

    def _others(self, besides: str | None = None) -> frozenset[str]:
        """Return the replicas that answer and were not tried yet."""
        return self._dispatch.reachable() - {*self._avoid, besides or "?"}

    def _give_up(self, failure: AttemptFailure, outcome: str = "gave_up") -> Exception:
        self._count("migrations_total", reason=(self._migrating or failure).loss or "failed", outcome=outcome)
        return ReplicaLost(failure.replica or "?", failure.reason)

    async def _record_resumption(self, attempt: Attempt, failure: AttemptFailure) -> None:
        """Record the migration when the first token after it arrives, which ends the gap that the client sees."""
        before = self._stream.journal.last_token_at
        await attempt.began
        self._migrating = None
        self._avoid.clear()
        self._count("migrations_total", reason=failure.loss or "failed", outcome="resumed")
        if self._metrics is not None and failure.loss == "drained":
            self._metrics.inc("handed_over_tokens_total", attempt.num_handed_over, kind="stream")
        if self._metrics is not None and before is not None:
            self._metrics.observe("migration_gap_seconds", time.monotonic() - before)

    def _count(self, name: str, **labels: str) -> None:
        if self._metrics is not None:
            self._metrics.inc(name, 1.0, **labels)
