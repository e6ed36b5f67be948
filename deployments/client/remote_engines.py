"""A model's engine replicas as an ingress reaches them: requests go by a dispatcher, tokens come over the wire.

generate ─▶ one task per request: Failover ─▶ Attempt ─▶ Dispatcher ── call open until the request has ended
                                                  ▲
            one connection per replica ── tokens ─┘
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import zmq

from deployments.client.attempt import ClientTimings, DispatchContext, Dispatcher
from deployments.client.failover import Failover, HedgeBudget
from deployments.client.protocol import FleetHealth, GenerateRequest, HealthState, ReplicaHealth, Turn, Unavailable
from deployments.client.stream import Stream
from deployments.config.settings import HealthSettings
from deployments.wire.connection import WireConnection
from deployments.wire.messages import Load
from deployments.wire.sockets import Context
from engine.stream_delta import StreamDelta
from monitoring.metrics import Metrics
from router.decisions import as_json
from router.fleet import Dispatch
from router.state import RouterState

logger = logging.getLogger("ray.serve")


class RemoteEngines:
    """`Engines` over the wire. Lives on one event loop, between `start` and `aclose`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        router: RouterState,
        num_expected: int,
        health: HealthSettings | None = None,
        timings: ClientTimings | None = None,
        metrics: Metrics | None = None,
        model: str = "",
    ) -> None:
        """`health` says when a replica counts as lost and what becomes of its requests. `model` is the fingerprint
        of the model whose tokens are sent; "" is not checked.
        """
        self.fleet, self.placer = router.fleet, router.placer
        self._model = model
        self._num_expected, self._timings = num_expected, timings or ClientTimings()
        self._dispatch = DispatchContext(uuid.uuid4().hex, dispatcher, self.fleet, self.placer, self._timings)
        self._context: Context = zmq.Context(io_threads=1)
        self._connections, self._attempts = self._dispatch.connections, self._dispatch.attempts
        self._health, self._metrics = health or HealthSettings(), metrics
        self._departed: Counter[str] = Counter()  # what connections that are closed had counted
        self._hedges = HedgeBudget(self._health.hedge_share)
        self._tasks: dict[Stream, asyncio.Task[None]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._subscriptions: list[Callable[[], None]] = []

    async def start(self) -> None:
        """Connect to the replicas there are, and to those that come."""
        loop = asyncio.get_running_loop()
        self._subscriptions = [
            self.fleet.subscribe(lambda: _call_soon(loop, self._sync)),
            self.fleet.on_dispatch(lambda dispatch: _call_soon(loop, lambda: self._announce(dispatch))),
        ]
        self._ticker = asyncio.create_task(self._tick_forever())
        self._sync()

    async def know_prefixes(self, timeout_s: float) -> bool:
        """Wait until the prefixes of all replicas that answer are known here; False when it takes too long."""
        deadline = time.monotonic() + timeout_s
        while not all(c.is_synced for c in self._connections.values() if c.is_answering or c.last_heard is None):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    async def aclose(self) -> None:
        """Abort what is unfinished, disconnect."""
        for unsubscribe in self._subscriptions:
            unsubscribe()
        tasks = [*self._tasks.values(), *([self._ticker] if self._ticker else [])]
        for stream in list(self._tasks):
            await stream.aclose()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        # Ending the context waits for the sockets' linger, so not on the event loop.
        await asyncio.to_thread(self._context.term)

    # --- Engines -------------------------------------------------------------------------------------------

    def prepared(self, request: GenerateRequest) -> GenerateRequest:
        """The request with its prompt's block hashes, which admission and placement look up."""
        return replace(request, block_hashes=self.placer.block_hashes(request))

    async def generate(self, request: GenerateRequest, turn: Turn | None = None) -> Stream:
        """Return once an engine accepted; raise Overloaded, Unavailable or Rejected when none did.

        `turn` hears when the stream begins.
        """
        self._check_available()
        stream = Stream(request, self._close, turn)
        # Serve 2.60 gives all handle calls made for one HTTP request the same internal id; of several at once it
        # routes one and forgets the others. In a context of its own each call gets an id of its own.
        failover = Failover(self._dispatch, stream, self._health, self._hedges, self._metrics)
        self._tasks[stream] = task = asyncio.create_task(failover.run(), context=contextvars.Context())
        task.add_done_callback(lambda _: self._tasks.pop(stream, None))
        try:
            await asyncio.wait_for(asyncio.shield(stream.accepted), self._timings.accept_s)
        except TimeoutError:
            await stream.aclose()
            raise Unavailable(f"no engine accepted within {self._timings.accept_s:g} s") from None
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        return stream

    async def health(self) -> FleetHealth:
        """How the engines are, from what has been heard of them."""
        members = self.fleet.addresses()
        replicas = tuple(
            _health_of(connection, is_draining=replica not in members)
            for replica, connection in sorted(self._connections.items())
        )
        health = FleetHealth("healthy", self._num_expected, replicas)
        state: HealthState = "healthy" if health.num_up >= self._num_expected else "degraded"
        return replace(health, state=state if health.num_up else "unhealthy")

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The last placements, newest first."""
        return [as_json(record) for record in self.placer.decisions(limit)]

    def wire_counts(self) -> Counter[str]:
        """Messages that connections dropped, and gaps they noticed, by kind, since the process started."""
        counts = Counter(self._departed)
        for connection in self._connections.values():
            counts.update(connection.counts)
        del counts["resumed"]
        return counts

    def index_lag(self) -> float:
        """Age of the oldest news of a connected replica's cache, in seconds; 0 when none is connected."""
        news = [connection.news_at for connection in self._connections.values() if connection.is_answering]
        return time.monotonic() - min(news) if news else 0.0

    @property
    def num_streams(self) -> int:
        """Requests that have not ended."""
        return len(self._tasks)

    def _check_available(self) -> None:
        """Without this, Serve would let a request wait for a replica as long as it takes to start one."""
        answering = self.fleet.addresses().keys() - self.fleet.lost()
        if not answering:
            raise Unavailable("no engine replica is up")

    def _close(self, stream: Stream) -> None:
        """A reader left: the cancelled attempt tells the engine."""
        task = self._tasks.get(stream)
        if task is not None:
            task.cancel()

    # --- WireListener --------------------------------------------------------------------------------------

    def on_deltas(self, replica: str, deltas: list[StreamDelta]) -> None:
        """Hand each request what it gained; ask again for what did not arrive in order."""
        missing = {}
        for delta in deltas:
            attempt = self._attempts.get(delta.request_id)
            if attempt is not None and not attempt.feed(replica, delta):
                missing[delta.request_id] = attempt.num_received
        if missing:
            self._connections[replica].resume(missing)

    def on_unknown(self, replica: str, request_ids: list[str]) -> None:
        """The replica has forgotten these requests: they were aborted while this ingress was away."""
        for request_id in request_ids:
            if request_id in self._attempts:
                self._attempts[request_id].lose("failed", "unknown to its replica")

    def on_load(self, replica: str, load: Load) -> None:
        """The router counts with it from now on."""
        self.fleet.record_load(replica, load)

    def on_prefix_delta(self, replica: str, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """Apply a change of a replica's prefix cache to the routing index."""
        self.placer.apply_delta(replica, stored, evicted)

    def on_prefix_snapshot(
        self, replica: str, hashes: Sequence[int], block_tokens: int, *, is_first: bool
    ) -> None:
        """All its cache holds, part by part."""
        if block_tokens == self.placer.settings.block_tokens and is_first:
            self.placer.replace(replica, hashes)
        elif block_tokens == self.placer.settings.block_tokens:
            self.placer.apply_delta(replica, hashes, [])
        elif block_tokens:
            logger.error(
                "replica %s counts prefixes in blocks of %d tokens, this ingress of %d: its cache stays unknown",
                replica,
                block_tokens,
                self.placer.settings.block_tokens,
            )

    def on_answering(self, replica: str, is_answering: bool) -> None:
        """A silent replica's requests go elsewhere."""
        self.fleet.mark_lost(replica, not is_answering)
        if not is_answering:
            self._dispatch.lose(replica, "silent", "it does not answer")

    def received(self, replica: str) -> Mapping[str, int]:
        """Tokens received of every unfinished request at that replica."""
        return {
            id_: attempt.num_received
            for id_, attempt in self._attempts.items()
            if attempt.replica == replica and not attempt.stream.ended.is_set()
        }

    # --- connections ---------------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Connect to replicas that are new; leave those that are gone, when their last stream has ended."""
        addresses = self.fleet.addresses()
        in_use = {attempt.replica for attempt in self._attempts.values()}
        for replica, connection in list(self._connections.items()):
            if addresses.get(replica) != connection.address and replica not in in_use:
                connection.close()
                self._departed.update(self._connections.pop(replica).counts)
        for replica, address in addresses.items():
            if replica not in self._connections:
                self._connections[replica] = WireConnection(
                    self._context,
                    address,
                    self._dispatch.ingress_id,
                    self,
                    time.monotonic,
                    self._health.lost_after_s,
                    self._model,
                )

    def _announce(self, dispatch: Dispatch) -> None:
        connection = self._connections.get(dispatch.replica)
        if connection is not None:
            connection.announce(dispatch.number, dispatch.request_id, dispatch.num_tokens)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._timings.tick_s)
            try:
                for connection in list(self._connections.values()):
                    connection.tick()
                self._sync()
            except Exception:
                logger.exception("looking after the engine connections failed")


def _health_of(connection: WireConnection, is_draining: bool) -> ReplicaHealth:
    heard, load = connection.last_heard, connection.load
    return ReplicaHealth(
        replica=connection.address.replica,
        is_connected=connection.is_answering,
        heartbeat_age_s=None if heard is None else time.monotonic() - heard,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        waiting_prefill_tokens=load.queued_prefill_tokens,
        kv_pages_free=load.pages_free,
        kv_pages_total=load.pages_total,
        is_draining=is_draining or load.is_draining,
    )


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(callback)
