"""An ingress's access to a model's engine replicas: a connection to each for its requests and tokens.

generate ─▶ Failover ─▶ Attempt ── request ─▶ one connection per replica
                           ▲                        │
     one task per request ─┴──────── tokens ────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import structs

from deployments.client.attempt import Attempt, ClientTimings, DispatchContext
from deployments.client.connector import Connector
from deployments.client.failover import Failover, HedgeBudget
from deployments.client.hand_overs import HandOvers
from deployments.client.prefix_sync import PrefixSync
from deployments.client.protocol import (
    DeliveryFailed,
    FleetHealth,
    FoundPart,
    FoundStream,
    GenerateRequest,
    HealthState,
    ReplicaHealth,
    Turn,
    Unavailable,
)
from deployments.client.replica_watch import Watch, Watcher
from deployments.client.store_tellers import StoreTellers
from deployments.client.stream import Stream
from deployments.client.stream_finder import StreamFinder
from deployments.config.settings import HealthSettings
from deployments.wire.connection import WireConnection
from deployments.wire.deadlines.deadline import awake_now, watch_of
from deployments.wire.deadlines.time_limit import timeout
from deployments.wire.handshake import Context
from deployments.wire.link import DealerLink, OpenLink
from deployments.wire.messages import Backlog, Found, Generate, Load, NotRun, StreamPart, TakeOver, unpack_tokens
from deployments.wire.sockets import make_context
from deployments.wire.turn_budget import TURN_BLOCKS, TurnBudget
from engine.values.stream_delta import STEP_FAILED, StreamDelta
from monitoring.metrics import Metrics
from router.addresses import ReplicaAddress, is_store
from router.decisions import as_json
from router.state import RouterState

logger = logging.getLogger("ray.serve")

BACKLOG_PERIOD_S = 0.2
"""Seconds between two reports of this ingress's backlog, while it changes."""
BACKLOG_REPEAT_S = 1.0
"""Seconds after which an unchanged report is repeated; a replica believes each report for longer."""


class RemoteEngines:
    """Implements `Engines` over the wire. Lives on one event loop, between `start` and `aclose`."""

    def __init__(
        self,
        router: RouterState,
        num_expected: int,
        watcher: Watcher | None = None,
        health: HealthSettings | None = None,
        timings: ClientTimings | None = None,
        metrics: Metrics | None = None,
        model: str = "",
        open_link: OpenLink = DealerLink,
    ) -> None:
        """`watcher` notices immediately when a replica's process dies; without it only silence shows that.
        `health` defines when a replica counts as lost, and the limits of retries. `model` is the fingerprint of
        the model that this ingress tokenizes for; "" is not checked. `open_link` opens the link to a replica.
        """
        self.fleet, self.placer = router.fleet, router.placer
        self._model, self._open_link = model, open_link
        self.num_expected = num_expected
        """Least number of replicas that are up in normal operation."""
        self._timings = timings or ClientTimings()
        self._ingress_id = uuid.uuid4().hex
        self._dispatch = DispatchContext(self.fleet, self.placer)
        self._context: Context = make_context()
        self._connections, self._attempts = self._dispatch.connections, self._dispatch.attempts
        self._health, self._metrics = health or HealthSettings(), metrics
        self._finder = StreamFinder(self._connections)
        self._watcher = watcher
        self._prefix_sync = PrefixSync(self._ask_for_prefixes)
        self._tellers = StoreTellers(self._prefix_sync.begin, self._prefix_sync.leave)
        self._connector = Connector(self._dispatch, self._connect, self._watch, self._leave)
        self._budget = TurnBudget(TURN_BLOCKS)
        self._hedges = HedgeBudget(self._health.hedge_share)
        self._tasks: dict[Stream, asyncio.Task[None]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._backlog: Callable[[str], Backlog] | None = None
        self._backlog_due = 0.0
        self._told: dict[str, tuple[str, Backlog, float]] = {}  # role -> replica, last report, its time
        self._unsubscribe: Callable[[], None] = lambda: None
        self._hand_overs = HandOvers(self._dispatch, self.placer.settings.keep_at_once, self._count_kept)

    async def start(self) -> None:
        """Connect to the present replicas, and to new ones as they appear."""
        loop = asyncio.get_running_loop()
        keep = self._hand_overs.keep
        self.placer.on_departed = lambda replica, prefixes: _call_soon(loop, lambda: keep(replica, prefixes))
        self._unsubscribe = self.fleet.subscribe(lambda: _call_soon(loop, self._connector.sync))
        self._ticker = asyncio.create_task(self._tick_forever())
        self._connector.sync()
        while self._connector.has_more:
            await asyncio.sleep(0)

    async def wait_for_prefixes(self, timeout_s: float) -> bool:
        """Wait until the hottest prefixes of all answering replicas are known. Return False after `timeout_s`."""
        deadline = awake_now() + timeout_s
        while not all(
            c.knows_hottest for c in self._connections.values() if c.is_answering or c.last_message_at is None
        ):
            if awake_now() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    def report_backlog(self, backlog: Callable[[str], Backlog]) -> None:
        """Report from now on the backlog of this ingress to one replica, which passes it on to the autoscaler.

        Where replicas have roles, one of each receives the result of `backlog` for its role; "": no role.
        """
        self._backlog = backlog

    async def aclose(self) -> None:
        """Abort unfinished requests and disconnect."""
        self._unsubscribe()
        tasks = [*self._tasks.values(), *([self._ticker] if self._ticker else [])]
        for stream in list(self._tasks):
            stream.leave_running()  # another ingress may continue it
            stream.fail(Unavailable("this ingress is being stopped"))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._hand_overs.aclose()
        self._prefix_sync.close()
        self._connector.close()
        # Ending the context waits for the sockets' linger, so it must not run on the event loop.
        await asyncio.to_thread(self._context.term)

    # --- Engines -------------------------------------------------------------------------------------------

    def prepared(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with its prompt's block hashes, which admission and placement look up."""
        return structs.replace(request, block_hashes=self.placer.block_hashes(request))

    async def generate(self, request: GenerateRequest, turn: Turn | None = None) -> Stream:
        """Return once an engine accepted; raise Overloaded, Unavailable or Rejected when none did.

        `turn` is notified when the stream begins.
        """
        self._check_available()
        return await self._run(Stream(request, self._close, turn))

    async def find(self, name: str, tenant: str) -> FoundStream | None:
        """Return a tenant's resumable stream from the replicas that have it; None if none that answers has it."""
        return await self._finder.find(name, tenant)

    async def adopt(self, request: GenerateRequest, found: FoundPart) -> Stream:
        """Continue to read the stream of a request from its first token. A former reader gets `TakenOver`.

        If its replica is lost, it continues at another one. Raises Unavailable or Rejected.
        """
        await self._end_former(found.part.request_id)
        number = int(found.part.request_id.removeprefix(request.request_id).removeprefix("~") or 0)
        return await self._run(self._begun(request, found.part), found.replica, number)

    async def _end_former(self, request_id: str) -> None:
        """End the stream that reads a request here, because it gets another reader."""
        if (former := self._attempts.get(request_id)) is not None:
            former.stream.give_up()
            if (task := self._tasks.get(former.stream)) is not None:
                task.cancel()
                await asyncio.wait([task])

    def _begun(self, request: GenerateRequest, part: StreamPart) -> Stream:
        """Return a stream with the tokens that earlier replicas have generated."""
        stream = Stream(request, self._close)
        output_ids = unpack_tokens(part.output_ids).tolist()
        if output_ids:
            before = StreamDelta(request.request_id, output_ids, num_cached=part.num_cached)
            stream.feed(before, time.monotonic())
        return stream

    # No caller of it keeps the stream, which holds an error whose traceback holds the callers' frames.
    async def _run(self, stream: Stream, runs_at: str | None = None, number: int = 0) -> Stream:
        """Return the stream once an engine accepted. `runs_at` is the replica that runs it already, as the attempt
        with this number.
        """
        health, hedges, metrics = self._health, self._hedges, self._metrics
        failover = Failover(self._dispatch, stream, health, hedges, metrics, runs_at, number)
        attempt = failover.begin()
        self._tasks[stream] = task = asyncio.create_task(failover.run(attempt))
        task.add_done_callback(partial(self._on_end, stream, attempt))
        longest = self._timings.accept_s
        try:
            with timeout(longest):
                await stream.accepted
        except TimeoutError:
            await stream.aclose()
            raise Unavailable(f"no engine accepted within {longest:g} s") from None
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        except BaseException:
            del stream, failover, attempt, task  # The stream holds the error, and its traceback holds this frame.
            raise
        return stream

    async def health(self) -> FleetHealth:
        """Return the engines' health, judged by their latest messages."""
        members = self.fleet.addresses()
        replicas = tuple(
            _health_of(connection, is_draining=replica not in members)
            for replica, connection in sorted(self._connections.items())
        )
        health = FleetHealth("healthy", self.num_expected, replicas)
        state: HealthState = "healthy" if health.num_up >= self.num_expected else "degraded"
        return replace(health, state=state if health.num_up else "unhealthy")

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """Return the last placements, newest first."""
        return [as_json(record) for record in self.placer.decisions(limit)]

    def wire_counts(self) -> Counter[str]:
        """Return the numbers of dropped messages and detected gaps, by kind, since the process started."""
        counts = self._connector.counts()
        del counts["resumed"]
        return counts

    def index_lag(self) -> float:
        """Return the age of the oldest view of a connected replica's cache, in seconds; 0 without replicas."""
        known = [connection.cache_known_at for connection in self._connections.values() if connection.is_answering]
        return time.monotonic() - min(known) if known else 0.0

    def reachable(self) -> frozenset[str]:
        """Return the replicas to which a request can be sent."""
        return self._dispatch.reachable()

    @property
    def num_synced(self) -> int:
        """Number of connected replicas whose whole cache is known."""
        return sum(connection.is_synced for connection in self._connections.values())

    @property
    def num_streams(self) -> int:
        """Number of requests that have not ended."""
        return len(self._tasks)

    @property
    def expects_engines(self) -> bool:
        """Whether requests wait for a replica while there is none."""
        return self._dispatch.expects_engines

    @property
    def are_awaited(self) -> bool:
        """Whether no replica answers, and one is expected to: new requests wait for it."""
        return self._dispatch.expects_engines and not self.reachable()

    def expect_none(self) -> None:
        """Note that the model is unloaded, so that no request waits for a replica until one has answered again."""
        self._dispatch.expects_engines = False

    def _check_available(self) -> None:
        """Raise Unavailable when no replica answers, and none is expected to."""
        if not self.reachable():
            self._connector.sync()  # A replica may have just appeared.
        if not self.reachable() and not self._dispatch.expects_engines:
            raise Unavailable("no engine replica is up")

    def _on_end(self, stream: Stream, first: Attempt, task: asyncio.Task[None]) -> None:
        """Forget a stream whose task has ended. If the task failed, its reader receives the error immediately.

        A task that is cancelled before it begins leaves its `first` attempt as it is.
        """
        self._tasks.pop(stream, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("the delivery of %s failed", stream.request.request_id, exc_info=error)
        if not stream.has_ended:
            failure = DeliveryFailed(f"the delivery of {stream.request.request_id} failed: {error!r}")
            failure.__cause__ = error
            stream.fail(failure)
        first.withdraw()

    def _close(self, stream: Stream) -> None:
        """Cancel the task of a stream that its reader closed; the attempt then aborts the request."""
        task = self._tasks.get(stream)
        if task is not None:
            task.cancel()

    # --- WireListener --------------------------------------------------------------------------------------

    def on_deltas(self, replica: str, deltas: list[StreamDelta]) -> None:
        """Pass each delta to its attempt; request again those that did not arrive in order."""
        missing, failed = {}, []
        for delta in deltas:
            attempt = self._attempts.get(delta.request_id)
            if attempt is None:
                if delta.finish_reason is None:  # abandoned here, which the replica does not know yet
                    self._connections[replica].abort(delta.request_id)
            elif not attempt.feed(replica, delta):
                missing[delta.request_id] = attempt.num_received
            elif delta.error_code == STEP_FAILED:
                failed.append(attempt)
        if missing:
            self._connections[replica].resume(missing)
        if failed:
            self._dispatch.fail_step(replica, failed)

    def on_unknown(self, replica: str, request_ids: list[str]) -> None:
        """Fail attempts that the replica no longer knows: it aborted them while this ingress was away."""
        for request_id in request_ids:
            if (attempt := self._attempts.get(request_id)) is not None:
                attempt.lose("failed", "unknown to its replica")

    def on_not_run(self, replica: str, message: NotRun) -> None:
        """Pass a replica's refusal to its attempt."""
        attempt = self._attempts.get(message.request_id)
        if attempt is not None and attempt.placed == replica:
            attempt.refuse(message)

    def on_found(self, replica: str, message: Found) -> None:
        """Pass a replica's answer to the searches."""
        self._finder.on_found(replica, message)

    def unanswered(self, replica: str) -> Iterable[Generate | TakeOver]:
        """Return the requests sent to that replica to which it has not answered, in the order sent."""
        sent = [attempt.unanswered for attempt in self._dispatch.sent_to(replica)]
        return [message for message in sent if message is not None]

    def on_load(self, replica: str, load: Load) -> None:
        """Pass the replica's load to the router."""
        self.fleet.record_load(replica, load)

    def on_prefix_delta(self, name: str, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """Apply a change of a replica's prefix cache, or of a store of files, to the routing index."""
        self.placer.apply_delta(name, stored, evicted)

    def on_prefix_tiers(self, name: str, hashes: Sequence[int], tiers: bytes) -> None:
        """Update the routing index with the tiers of blocks that the replica holds."""
        self.placer.apply_tiers(name, hashes, tiers)

    def on_prefix_snapshot(
        self, name: str, hashes: Sequence[int], block_tokens: int, *, is_first: bool, is_last: bool
    ) -> None:
        """Apply one part of a snapshot of a replica's prefix cache, or of a store, to the routing index."""
        began = time.perf_counter()
        self._apply_part(name, hashes, block_tokens, is_first)
        seconds = time.perf_counter() - began
        self._prefix_sync.took(name, is_first=is_first, is_last=is_last, seconds=seconds)

    def on_prefixes_unknown(self, replica: str, name: str) -> None:
        """Schedule a request for a replica's prefixes, or for those in its store if it reports these."""
        if is_store(name):
            self._tellers.begin(replica, name)
        else:
            self._prefix_sync.begin(name)

    def _ask_for_prefixes(self, name: str) -> None:
        teller = self._tellers.of(name) if is_store(name) else name
        self._connections[teller].ask_for_prefixes(is_store=is_store(name))

    def _ask_no_more(self, replica: str) -> None:
        """Stop asking a replica: it does not answer, or is gone."""
        self._prefix_sync.leave(replica)
        self._tellers.leave(replica)

    def _leave(self, connection: WireConnection) -> None:
        self._ask_no_more(connection.address.replica)
        self._hand_overs.leave(connection)

    def _apply_part(self, name: str, hashes: Sequence[int], block_tokens: int, is_first: bool) -> None:
        if block_tokens == self.placer.settings.block_tokens and is_first:
            self.placer.replace(name, hashes)
        elif block_tokens == self.placer.settings.block_tokens:
            self.placer.extend(name, hashes)
        elif block_tokens:
            logger.error(
                "%s hashes prefixes in blocks of %d tokens, but this ingress in blocks of %d: "
                "the replica's cache stays unknown",
                name,
                block_tokens,
                self.placer.settings.block_tokens,
            )

    def on_answering(self, replica: str, is_answering: bool) -> None:
        """Mark a replica as lost or answering; fail the attempts at a silent one."""
        self.fleet.mark_lost(replica, not is_answering)
        self._dispatch.changed()
        self._dispatch.expects_engines |= is_answering
        if not is_answering:
            self._ask_no_more(replica)
            self._dispatch.lose(replica, "silent", "it does not answer")

    def received(self, replica: str) -> Mapping[str, int]:
        """Return the number of tokens received of each unfinished request at that replica."""
        return {
            attempt.wire_id: attempt.num_received
            for attempt in self._dispatch.sent_to(replica)
            if attempt.replica == replica and not attempt.stream.has_ended
        }

    # --- connections ---------------------------------------------------------------------------------------

    def _connect(self, address: ReplicaAddress) -> WireConnection:
        return WireConnection(
            self._context,
            address,
            self._ingress_id,
            self,
            time.monotonic,
            self._health.lost_after_s,
            self._model,
            self._budget,
            self._open_link,
        )

    def _watch(self, replica: str) -> Watch | None:
        if self._watcher is None:
            return None
        return Watch(
            self._watcher,
            replica,
            self._ingress_id,
            self._dispatch.lose,
            lambda: replica in self.fleet.addresses(),
        )

    async def _tick_forever(self) -> None:
        awake = watch_of(asyncio.get_running_loop())
        while True:
            await asyncio.sleep(self._timings.tick_s)
            # Failovers read this clock too, but not often enough. It is read before connections receive, so
            # that no deadline passes while an answer is unread.
            for check in self._checks(awake.now(), time.monotonic()):
                try:
                    check()
                except Exception:  # An error of one connection must not stop other checks.
                    logger.exception("checking the connections to engine replicas failed")

    def _checks(self, awake_s: float, now: float) -> list[Callable[[], None]]:
        repeats = (partial(attempt.repeat, awake_s, self._timings.repeat_s) for attempt in self._attempts.values())
        ticks = (connection.tick for connection in self._connections.values())
        return [
            *ticks,
            *repeats,
            partial(self._hand_overs.tick, now),
            self._connector.sync,
            partial(self._tell_backlog, now),
        ]

    def _count_kept(self, num_tokens: int) -> None:
        if self._metrics is not None:
            self._metrics.inc("handed_over_tokens_total", num_tokens, kind="prefix")

    def _tell_backlog(self, now: float) -> None:
        """Report the backlog when it is due, to the first connected replica of each role, which knows its own
        speed.
        """
        if self._backlog is None or now < self._backlog_due:
            return
        self._backlog_due = now + BACKLOG_PERIOD_S
        members, told = self.fleet.addresses(), set[str]()
        for replica, connection in self._connections.items():  # in the order in which they connected
            role = connection.address.role
            # Serve ignores reports of a replica that it is stopping.
            is_heard = connection.is_answering and replica in members and not connection.load.is_draining
            if is_heard and role not in told:
                told.add(role)
                backlog, (heard, known, at) = self._backlog(role), self._told.get(role, ("", Backlog(), 0.0))
                if (heard, known) != (replica, backlog) or now - at >= BACKLOG_REPEAT_S:
                    self._told[role] = replica, backlog, now
                    connection.tell_backlog(backlog)


def _health_of(connection: WireConnection, is_draining: bool) -> ReplicaHealth:
    last_at, load = connection.last_message_at, connection.load
    return ReplicaHealth(
        replica=connection.address.replica,
        is_connected=connection.is_answering,
        heartbeat_age_s=None if last_at is None else time.monotonic() - last_at,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        waiting_prefill_tokens=load.queued_prefill_tokens,
        kv_pages_free=load.pages_free,
        kv_pages_total=load.pages_total,
        is_draining=is_draining or load.is_draining,
        failing=load.failing or None,
    )


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(callback)
