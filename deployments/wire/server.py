"""The replica's end of the wire: a ROUTER socket that receives requests from ingresses and sends their tokens.

    wire's thread     receive ─▶ decode ─▶ on_generate, on_abort, the outbox; heartbeats
    engine's thread   publish ─▶ one message per ingress

The engine's thread itself sends a step's tokens: another thread would first have to acquire Python's interpreter
lock, which a busy engine seldom releases. It decodes no messages. A lock guards the socket and the outbox, and no
code that holds it blocks.
"""

from __future__ import annotations

import logging
import secrets
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from deployments.config.settings import StreamSettings, WireSettings
from deployments.wire import messages
from deployments.wire.backlogs import Backlogs, BacklogTotals
from deployments.wire.handshake import Doorkeeper
from deployments.wire.messages import (
    Abort,
    Backlog,
    Detach,
    Find,
    Found,
    Generate,
    Hello,
    Load,
    NextPart,
    NotRun,
    NotRunKind,
    Resume,
    Resync,
    TakeOver,
)
from deployments.wire.outbox import Outbox
from deployments.wire.peers import Peers
from deployments.wire.prefix_feed import NoPrefixes, PrefixFeed, PrefixSource
from deployments.wire.receiver import Receiver
from deployments.wire.resumable import NO_INGRESS, ResumableStreams
from deployments.wire.sender import Sender
from deployments.wire.session import Session
from deployments.wire.sockets import bind, descriptor, is_readable, make_router
from deployments.wire.wake_up import WakeUp
from engine.base.awake_clock import AwakeClock
from engine.values.stream_delta import StreamDelta

logger = logging.getLogger("ray.serve")

TURN_MESSAGES = 64
"""Messages that are handled without a pause, before the engine's thread and the heartbeats have a turn."""
TURN_BYTES = 2**22
"""Bytes of messages after which such a turn ends as well."""
TAKEN = "another reader continues the stream"
TURN_PAUSE_S = 0.001
"""Pause after a full turn of messages, in which the engine's thread can acquire Python's interpreter lock."""


@dataclass(frozen=True, slots=True)
class WireTimings:
    """Periods and timeouts of the replica's end, in seconds."""

    heartbeat_s: float = 0.05
    """Greatest age of the load that a connected ingress knows, while the engine has requests."""
    idle_heartbeat_s: float = 0.2
    """Time between two heartbeats, if longer, once nothing has been delivered for `keep_ended_s`."""
    keep_ended_s: float = 10.0
    """Time for which an ended stream can still be requested again."""
    absent_ingress_s: float = 10.0
    """Time without its ingress after which a request is aborted, because no client would read it."""
    cache_period_s: float = 0.25
    """Time between two deltas of the prefix cache."""


class RequestHandler(Protocol):
    """Handles the ingresses' requests. The methods are called in the wire's thread, which they must not block."""

    def on_generate(self, ingress_id: str, request: Generate) -> None:
        """Answer with `WireServer.open` and `accept`, or with `refuse`, now or later. A request may come twice."""
        ...

    def on_abort(self, request_id: str) -> None:
        """End a request that was opened."""
        ...

    def on_withdrawn(self, ingress_id: str, request_id: str) -> None:
        """Drop a request that was not answered yet. The id may be unknown."""
        ...


class WireServer:
    """Receives requests and delivers their tokens. All methods are callable from any thread."""

    def __init__(
        self,
        host: str,
        replica: str,
        load: Callable[[], Load],
        handler: RequestHandler,
        timings: WireTimings | None = None,
        prefixes: PrefixSource | None = None,
        block_tokens: int = 0,
        model: str = "",
        settings: WireSettings | None = None,
        store: PrefixSource | None = None,
        streams: StreamSettings | None = None,
    ) -> None:
        """`load` returns the engine's part of the load, `prefixes` its cache in blocks of `block_tokens`, `store`
        the files from which it reads; `model` is the model's fingerprint, "" if it has none; `streams` bounds the
        resumable streams. Raises OSError when no port of `settings` is free.
        """
        self.replica = replica
        self._block_tokens, self._model = block_tokens, model
        self._settings = settings or WireSettings()
        self.epoch = secrets.randbits(48)
        self.counts: Counter[str] = Counter()
        """Numbers of dropped messages by reason, and of sends that had to be repeated."""
        self._handler = handler
        self._timings = timings or WireTimings()
        period_s = self._timings.cache_period_s
        self._cache_feed = PrefixFeed(prefixes or NoPrefixes(), period_s)
        self._store_feed = PrefixFeed(store or NoPrefixes(), period_s, is_store=True)
        self._outbox = Outbox()
        self._resumable = ResumableStreams(self._outbox, streams or StreamSettings(), handler.on_abort)
        self._asking: dict[tuple[str, bool], Session] = {}  # ingresses that wait for a part, of a cache or a store
        self._absent_since: dict[str, float] = {}
        self._backlogs = Backlogs()
        self._lock = threading.RLock()
        self._clock = AwakeClock(time.monotonic)  # no ingress is absent because this process was suspended
        self._context = zmq.Context(io_threads=1)
        self._closing = threading.Event()
        self._open_socket(host)
        self._sender = Sender(
            self._socket,
            self.epoch,
            self._outbox,
            self._timings.heartbeat_s,
            load,
            self.counts,
            self._backlogs.forget,
        )
        self._wake_up = WakeUp()
        self._thread = threading.Thread(target=self._serve, name="wire", daemon=True)

    def _open_socket(self, host: str) -> None:
        settings = self._settings
        self._doorkeeper = Doorkeeper(self._context, settings.encrypt, settings.handshake_s)
        self.secret, self.public_key = self._doorkeeper.secret, self._doorkeeper.public_key
        self._socket = make_router(self._context, self._doorkeeper)
        self._peers = Peers(self._socket, self.counts)
        self._receiver = Receiver(self._socket, self._peers)
        try:
            self.endpoint, self._peers.port = bind(self._socket, host, settings.ports)
        except Exception:
            self._close_sockets()
            raise

    def start(self) -> None:
        """Begin to talk to ingresses. Until then their messages wait."""
        self._thread.start()

    # --- requests ------------------------------------------------------------------------------------------

    def open(self, request: Generate, ingress_id: str) -> bool:
        """Add a request before the engine produces output for it. Return False if its ingress has sent it before.

        Raises ValueError when another ingress uses the id.
        """
        with self._lock:
            if self._outbox.owns(ingress_id, request.request_id):
                return False
            self._outbox.open(request.request_id, ingress_id, is_resumable=request.stream is not None)
            if request.stream is not None:
                self._resumable.open(request, request.stream)
            return True

    def accept(self, request_id: str) -> None:
        """Notify the ingress that the engine accepted an opened request: with its first tokens or before the next
        heartbeat, because a separate message would cost as much as the one with the tokens.
        """
        with self._lock:
            self._outbox.accept(request_id)

    def accept_now(self, request_id: str, ingress_id: str) -> None:
        """Notify the ingress immediately, in a separate message, that the request is accepted."""
        with self._lock:
            self._outbox.accept(request_id)
            self._sender.flush(ingress_id, self._now())
            self._notice_messages()

    def is_beginning(self, request_id: str, num_tokens: int) -> bool:
        """Return whether a request is unfinished and has fewer than `num_tokens` tokens."""
        with self._lock:
            return self._outbox.is_beginning(request_id, num_tokens)

    def refuse(
        self,
        ingress_id: str,
        request_id: str,
        kind: NotRunKind,
        reason: str,
        retry_after_s: float = 1.0,
    ) -> None:
        """Notify an ingress why the engine does not run its request."""
        with self._lock:
            session = self._sender.sessions.get(ingress_id)
            if session is not None:
                message = NotRun(self.epoch, session.seq, request_id, kind, reason, retry_after_s)
                self._sender.post(ingress_id, session, messages.encode(message))
                self._notice_messages()

    def forget(self, request_id: str) -> None:
        """Drop a request that was opened."""
        with self._lock:
            self._resumable.forget([request_id])

    def fail_all(self, reason: str) -> None:
        """Drop all unfinished requests, and notify their ingresses that this replica does not continue them."""
        with self._lock:
            for ingress_id in self._outbox.ingresses():
                for request_id in self._outbox.live_of(ingress_id):
                    self._resumable.forget([request_id])
                    self.refuse(ingress_id, request_id, "engine_ended", reason)

    def publish(self, deltas: Sequence[StreamDelta]) -> None:
        """Send a step's deltas: one message per ingress, now."""
        now = self._now()
        with self._lock:
            for ingress_id in {self._outbox.record(delta, now) for delta in deltas}:
                if ingress_id is not None:
                    self._sender.flush(ingress_id, now)
            self._notice_messages()

    def is_connected(self, ingress_id: str) -> bool:
        """Return whether an ingress has said hello and is still connected."""
        return ingress_id in self._sender.sessions

    @property
    def num_live(self) -> int:
        """Number of unfinished requests."""
        return self._outbox.num_live

    @property
    def num_kept(self) -> int:
        """Number of requests whose output is kept, including ended ones."""
        return self._outbox.num_kept

    @property
    def num_detached(self) -> int:
        """Number of requests of resumable streams without a reader."""
        return self._resumable.num_without_reader

    @property
    def detached_bytes(self) -> int:
        """Bytes that they take."""
        with self._lock:
            return self._resumable.num_bytes

    @property
    def num_ingresses(self) -> int:
        """Number of ingresses that are connected."""
        return len(self._sender.sessions)

    def has_streams_of(self, ingress_id: str) -> bool:
        """Return whether any output of this ingress's requests has yet to be produced or sent."""
        with self._lock:
            return self._outbox.num_live_of(ingress_id) > 0 or self._outbox.has_unsent(ingress_id)

    def backlog(self) -> BacklogTotals:
        """Return the waiting requests of the ingresses that report to this replica."""
        with self._lock:
            return self._backlogs.totals(self._now())

    def close(self) -> None:
        """Stop the thread and close the socket. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        with self._lock:
            self._sender.close()
        if self._thread.is_alive():
            self._wake_up.wake()
            self._thread.join(timeout=5.0)
        with self._lock:
            self._close_sockets()
            self._wake_up.close()

    def _close_sockets(self) -> None:
        self._peers.close()
        self._doorkeeper.close()
        self._socket.close(linger=500)
        self._context.term()

    # --- receiving -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = select.poll()
        doorkeeper, peers = descriptor(self._doorkeeper.socket), descriptor(self._peers.socket)
        for watched in (descriptor(self._socket), doorkeeper, peers, self._wake_up.readable):
            poller.register(watched, select.POLLIN)
        tick_at = 0.0
        signalled: set[int] = set()
        while not self._closing.is_set():
            now = self._now()
            is_due, is_more = now >= tick_at, False
            try:
                # Asking a socket without messages costs as much as sending one.
                if is_due or doorkeeper in signalled:
                    self._doorkeeper.answer()
                if is_due or peers in signalled:
                    self._peers.look(now)
                if is_due:
                    with self._lock:
                        self._tick(now)
                is_more = self._receive_turn()
                self._send_parts()
            except Exception:  # an error caused by one ingress must not stop the wire
                logger.exception("the wire failed to serve its ingresses")
                self.counts["failed"] += 1
            next_at = now + self._tick_period_s()
            tick_at = next_at if is_due else min(tick_at, next_at)
            if is_more:
                time.sleep(TURN_PAUSE_S)
            wait_ms = 0.0 if is_more else max(1.0, (tick_at - self._now()) * 1000)
            signalled = {at for at, _ in poller.poll(wait_ms)}
            if self._wake_up.readable in signalled:
                self._wake_up.clear()

    def _notice_messages(self) -> None:
        """Wake the wire's thread if a message has arrived: sending may have consumed the signal."""
        if is_readable(self._socket):
            self._wake_up.wake()

    def _receive_turn(self) -> bool:
        """Handle messages that have arrived, in the wire's thread, which decodes them without the lock.

        Return whether the turn ended before they did. ZeroMQ takes turns among the ingresses.
        """
        num_messages = num_bytes = 0
        while not self._closing.is_set():
            if num_messages >= TURN_MESSAGES or num_bytes >= TURN_BYTES:
                return True
            with self._lock:
                received = self._receiver.receive()
            if received is None:
                return False
            num_messages, num_bytes = num_messages + 1, num_bytes + received.size
            if received.data is None:
                self.counts["malformed"] += bool(received.identity)
                continue
            try:
                self._handle(received.identity, messages.decode_to_replica(received.data))
            except messages.MalformedMessage:
                self.counts["malformed"] += 1
            except Exception:  # no message may stop the wire
                logger.exception("the wire could not handle a message")
                self.counts["failed"] += 1
        return False

    def _handle(self, identity: bytes, message: messages.ToReplica) -> None:
        with self._lock:
            if isinstance(message, Hello):
                return self._greet(identity, message)
            ingress_id = self._sender.ingress_of(identity)
            if ingress_id is None:
                self.counts["unauthenticated"] += 1
                return None
            if isinstance(message, Abort):
                if self._outbox.owns(ingress_id, message.request_id):
                    return self._handler.on_abort(message.request_id)
                return self._handler.on_withdrawn(ingress_id, message.request_id)
            if isinstance(message, Resume):
                return self._resume(ingress_id, message.received)
            if isinstance(message, Detach):
                return self._resumable.detach(ingress_id, message.request_id, self._now())
            if isinstance(message, Find):
                return self._find(ingress_id, message)
            if isinstance(message, TakeOver):
                return self._take_over(ingress_id, message)
            if isinstance(message, Backlog):
                return self._backlogs.take(ingress_id, message, self._now())
            session = self._sender.sessions[ingress_id]
            if isinstance(message, Resync | NextPart):
                known = session.store if message.is_store else session.cache
                known.wants_first = known.wants_first or isinstance(message, Resync)
                self._asking[ingress_id, message.is_store] = session
                return None
            session.dispatches_seen = max(session.dispatches_seen, message.number)
            if self._outbox.is_known(message.request_id):
                return self._again(ingress_id, message)
        # Building a long prompt's request takes milliseconds, in which the engine's thread can send.
        try:
            return self._handler.on_generate(ingress_id, message)
        except Exception:
            self.refuse(ingress_id, message.request_id, "failed", "the replica could not take the request")
            raise

    def _send_parts(self) -> None:
        """Send each ingress the part of a snapshot that it waits for: one, however often it asked in this turn.

        The part is built without the lock, so that the engine's thread can send.
        """
        while self._asking:
            (ingress_id, is_store), session = self._asking.popitem()
            feed = self._store_feed if is_store else self._cache_feed
            part = feed.next_part(session)
            with self._lock:
                is_sent = self._sender.sessions.get(ingress_id) is session and self._sender.post(
                    ingress_id, session, part.encoded(self.epoch, session.seq)
                )
                self._notice_messages()
            feed.sent(session, part, is_sent)

    def _again(self, ingress_id: str, request: Generate) -> None:
        """Answer a repeated request, from this ingress or under an id that another ingress uses."""
        if self._outbox.owns(ingress_id, request.request_id):
            return self._resume(ingress_id, {request.request_id: 0})
        return self.refuse(ingress_id, request.request_id, "never_fits", "the request's id is already in use")

    def _find(self, ingress_id: str, asked: Find) -> None:
        session = self._sender.sessions[ingress_id]
        record, parts = self._resumable.find(asked.name, asked.tenant)
        found = Found(self.epoch, session.seq, asked.name, asked.tenant, record, parts)
        self._sender.post(ingress_id, session, messages.encode(found))

    def _take_over(self, ingress_id: str, message: TakeOver) -> None:
        """Send a resumable stream to another ingress. The one that read it before is told."""
        session, request_id = self._sender.sessions[ingress_id], message.request_id
        session.dispatches_seen = max(session.dispatches_seen, message.number)
        former = self._resumable.take_over(ingress_id, request_id)
        if former is not None:
            self.refuse(former, request_id, "taken", TAKEN)
        self._resume(ingress_id, {request_id: 0})

    def _greet(self, identity: bytes, hello: Hello) -> None:
        if hello.version < messages.OLDEST_WIRE_VERSION:
            expected = f"this replica expects at least version {messages.OLDEST_WIRE_VERSION}"
            return self._refuse(identity, f"the hello has wire version {hello.version}, {expected}")
        if hello.model and self._model and hello.model != self._model:
            return self._refuse(identity, f"the ingress serves model {hello.model}, not {self._model}")
        before = self._sender.sessions.get(hello.ingress_id)
        if before is not None and hello.number <= before.hello_number:
            self.counts["replayed"] += 1
            return None
        session = self._sender.begin(hello.ingress_id, identity, hello.number)
        welcome = messages.Welcome(
            self.epoch,
            session.seq,
            self.replica,
            self._model,
            self._block_tokens,
            hello.number,
            messages.WIRE_VERSION,
        )
        if self._sender.post(hello.ingress_id, session, messages.encode(welcome)):
            self._resume(hello.ingress_id, hello.received)

    def _refuse(self, identity: bytes, reason: str) -> None:
        self.counts["refused"] += 1
        self._sender.post("", Session(identity), messages.encode(messages.Refused(reason)))

    def _resume(self, ingress_id: str, received: dict[str, int]) -> None:
        unknown = self._outbox.resume(ingress_id, received)
        session = self._sender.sessions.get(ingress_id)
        for request_id in received:
            if self._outbox.owns(ingress_id, request_id):
                self._resumable.take(request_id)
        for request_id in [id_ for id_ in unknown if self._resumable.is_known(id_)]:
            unknown.remove(request_id)
            self.refuse(ingress_id, request_id, "taken", TAKEN)
        if unknown and session is not None:
            message = messages.Unknown(self.epoch, session.seq, unknown)
            self._sender.post(ingress_id, session, messages.encode(message))
        self._sender.flush(ingress_id, self._now())

    # --- time ----------------------------------------------------------------------------------------------

    def _now(self) -> float:
        with self._lock:
            return self._clock.now()

    def _tick_period_s(self) -> float:
        """Return the time until the next tick: an idle engine's load is constant, and no message is in transit."""
        period_s, load = self._timings.heartbeat_s / 2, self._sender.last_load
        if self._outbox.is_active or load.num_running or load.num_waiting:
            return period_s
        return max(period_s, self._timings.idle_heartbeat_s)

    def _tick(self, now: float) -> None:
        self._sender.beat(now)
        for feed in (self._cache_feed, self._store_feed):
            feed.send_due(now, self.epoch, self._sender.sessions, self._sender.post)
        for request_id in self._outbox.ended_before(now - self._timings.keep_ended_s):
            if self._resumable.is_known(request_id):
                self._outbox.retire(request_id)
                self._resumable.leave(request_id, now)
            else:
                self._resumable.forget([request_id])
        absent = self._outbox.ingresses() - self._sender.sessions.keys() - {NO_INGRESS}
        self._absent_since = {ingress_id: self._absent_since.get(ingress_id, now) for ingress_id in absent}
        for ingress_id, since in self._absent_since.items():
            if now - since > self._timings.absent_ingress_s:
                for request_id in self._outbox.take_unaborted(ingress_id):
                    self._handler.on_abort(request_id)
        self._resumable.look_through(now, self._absent_since)
