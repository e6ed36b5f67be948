"""The replica's end of the wire: one ROUTER socket that sends every ingress its tokens.

The engine's thread itself sends a step's tokens: another thread would first have to acquire Python's interpreter
lock, which a busy engine seldom releases. A lock guards the socket, and no code that holds it blocks.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import zmq

from deployments.wire import messages
from deployments.wire.messages import Abort, Announce, Hello, Load, Resume, Resync
from deployments.wire.outbox import Outbox
from deployments.wire.prefix_feed import PrefixFeed, PrefixSource
from deployments.wire.session import Session
from deployments.wire.sockets import bind_router, descriptor, is_readable
from engine.stream_delta import StreamDelta

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class WireTimings:
    """Periods and timeouts of the replica's end, in seconds."""

    heartbeat_s: float = 0.05
    """Greatest age of the load that a connected ingress knows."""
    keep_ended_s: float = 10.0
    """Time for which an ended stream can still be requested again."""
    absent_ingress_s: float = 10.0
    """Time without its ingress after which a request is aborted, as no client would read it."""
    cache_period_s: float = 0.25
    """Time between two deltas of the prefix cache."""
    dispatch_s: float = 2.0
    """Time for which an announced request counts as load before it arrives."""


class WireServer:
    """Delivers each request's tokens, from `accept` to its end. All methods are callable from any thread."""

    def __init__(
        self,
        host: str,
        replica: str,
        load: Callable[[], Load],
        on_abort: Callable[[str], None],
        timings: WireTimings | None = None,
        prefixes: PrefixSource | None = None,
        block_tokens: int = 0,
        model: str = "",
        ports: tuple[int, int] | None = None,
    ) -> None:
        """`load` returns the engine's part of the load, `prefixes` its cache in blocks of `block_tokens`; `model`
        is the model's fingerprint, "" when it has none. `bind_router` explains `ports`.
        """
        self.replica = replica
        self._block_tokens, self._model = block_tokens, model
        self._last_hello: dict[str, int] = {}  # ingress -> number
        self.secret = secrets.token_hex(32)
        self.epoch = secrets.randbits(48)
        self.counts: Counter[str] = Counter()
        """Numbers of dropped messages by reason, and of sends that had to be repeated."""
        self._engine_load, self._on_abort = load, on_abort
        self._timings = timings or WireTimings()
        self._cache_feed = None if prefixes is None else PrefixFeed(prefixes, self._timings.cache_period_s)
        self._outbox = Outbox()
        self._sessions: dict[str, Session] = {}  # ingress -> session
        self._ingress_of: dict[bytes, str] = {}  # authenticated identity -> ingress
        self._absent_since: dict[str, float] = {}
        self._lock = threading.RLock()
        self._context = zmq.Context(io_threads=1)
        self._socket, self.endpoint = bind_router(self._context, host, ports)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="wire", daemon=True)
        self._thread.start()

    # --- requests ------------------------------------------------------------------------------------------

    def open(self, request_id: str, ingress_id: str) -> None:
        """Add a request before the engine produces output for it. Raises ValueError when the id is in use."""
        with self._lock:
            self._outbox.open(request_id, ingress_id)
            if ingress_id in self._sessions:
                self._sessions[ingress_id].arrived(request_id)

    def accept(self, request_id: str, ingress_id: str) -> None:
        """Tell the ingress at once that the engine accepted the request."""
        with self._lock:
            self._flush(ingress_id)

    def forget(self, request_id: str) -> None:
        """Drop a request that the engine did not accept."""
        with self._lock:
            self._outbox.forget([request_id])

    def publish(self, deltas: Sequence[StreamDelta]) -> None:
        """Send a step's deltas: one message per ingress, now."""
        now = time.monotonic()
        with self._lock:
            for ingress_id in {self._outbox.record(delta, now) for delta in deltas}:
                if ingress_id is not None:
                    self._flush(ingress_id)
            # Sending may consume the signal that a message has arrived.
            self._receive_all()

    def is_connected(self, ingress_id: str) -> bool:
        """Return whether an ingress has said hello and is still connected."""
        return ingress_id in self._sessions

    @property
    def num_live(self) -> int:
        """Number of unfinished requests."""
        return self._outbox.num_live

    def close(self) -> None:
        """Stop the thread and close the socket. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(timeout=5.0)
        with self._lock:
            self._socket.close(linger=500)
        self._context.term()

    # --- sending -------------------------------------------------------------------------------------------

    def _flush(self, ingress_id: str) -> None:
        """Send an ingress its unsent tokens. Those that cannot be sent now stay in the outbox."""
        session = self._sessions.get(ingress_id)
        if session is None or self._closing.is_set():
            return
        deltas = self._outbox.unsent(ingress_id)
        if deltas and self._send(ingress_id, session, deltas):
            self._outbox.mark_sent(ingress_id)

    def _send(self, ingress_id: str, session: Session, deltas: list[StreamDelta]) -> bool:
        """Send deltas, with the load when it is due, or a heartbeat when there are none."""
        now = time.monotonic()
        is_due = now - session.last_load >= self._timings.heartbeat_s / 2 or any(map(_changes_load, deltas))
        load = self._load(ingress_id) if is_due or not deltas else None
        message: messages.ToIngress
        if load is None or deltas:
            message = messages.Tokens(self.epoch, session.seq, deltas, load)
        else:
            message = messages.Heartbeat(self.epoch, session.seq, load)
        is_sent = self._post(ingress_id, session, messages.encode(message))
        if is_sent and load is not None:
            session.last_load = now
        return is_sent

    def _post(self, ingress_id: str, session: Session, data: bytes) -> bool:
        try:
            self._socket.send(session.identity, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            self.counts["congested"] += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop_session(ingress_id)
            return False
        session.seq += 1
        return True

    def _load(self, ingress_id: str) -> Load:
        """Return the engine's load, including announced requests."""
        session = self._sessions[ingress_id]
        load = self._engine_load()
        announced = [tokens for other in self._sessions.values() for tokens, _ in other.announced.values()]
        return replace(
            load,
            num_requests=self._outbox.num_live + len(announced),
            num_own=self._outbox.num_live_of(ingress_id) + len(session.announced),
            queued_prefill_tokens=load.queued_prefill_tokens + sum(announced),
            dispatches_seen=session.dispatches_seen,
        )

    # --- receiving -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(descriptor(self._socket), select.POLLIN)
        period_ms = max(1.0, self._timings.heartbeat_s * 1000 / 2)
        while not self._closing.is_set():
            poller.poll(period_ms)
            try:
                with self._lock:
                    self._receive_all()
                    self._tick(time.monotonic())
            except Exception:  # an error caused by one ingress must not stop the wire
                logger.exception("the wire failed to serve its ingresses")
                self.counts["failed"] += 1

    def _receive_all(self) -> None:
        while not self._closing.is_set() and is_readable(self._socket):
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 2:
                self.counts["malformed"] += 1
                continue
            try:
                self._handle(frames[0], frames[1])
            except Exception:  # no message may stop the wire, or the engine that publishes on it
                logger.exception("the wire could not handle a message")
                self.counts["failed"] += 1

    def _handle(self, identity: bytes, data: bytes) -> None:
        try:
            message = messages.decode_to_replica(data)
        except messages.MalformedMessage:
            self.counts["malformed"] += 1
            return
        if isinstance(message, Hello):
            self._greet(identity, message)
            return
        ingress_id = self._ingress_of.get(identity)
        if ingress_id is None:
            self.counts["unauthenticated"] += 1
        elif isinstance(message, Abort):
            if self._outbox.owns(ingress_id, message.request_id):
                self._on_abort(message.request_id)
        elif isinstance(message, Resume):
            self._resume(ingress_id, message.received)
        elif isinstance(message, Resync):
            self._sessions[ingress_id].is_synced = False
        elif isinstance(message, Announce):
            self._announce(self._sessions[ingress_id], message)

    def _announce(self, session: Session, dispatch: Announce) -> None:
        if not session.announce(dispatch, time.monotonic() + self._timings.dispatch_s):
            self.counts["replayed"] += 1
        if self._outbox.is_known(dispatch.request_id):
            session.arrived(dispatch.request_id)  # The request arrived before its announcement.

    def _greet(self, identity: bytes, hello: Hello) -> None:
        if not hmac.compare_digest(hello.secret.encode(), self.secret.encode()):
            return self._refuse(identity, "the secret is wrong")
        if hello.version != messages.WIRE_VERSION:
            expected = f"this replica expects version {messages.WIRE_VERSION}"
            return self._refuse(identity, f"the hello has wire version {hello.version}, {expected}")
        if hello.model and self._model and hello.model != self._model:
            return self._refuse(identity, f"the ingress serves model {hello.model}, not {self._model}")
        if hello.number <= self._last_hello.get(hello.ingress_id, -1):
            self.counts["replayed"] += 1
            return None
        self._last_hello[hello.ingress_id] = hello.number
        self._drop_session(hello.ingress_id)
        self._sessions[hello.ingress_id] = session = Session(identity)
        self._ingress_of[identity] = hello.ingress_id
        self._absent_since.pop(hello.ingress_id, None)
        welcome = messages.Welcome(self.epoch, session.seq, self.replica, self._model, self._block_tokens)
        if self._post(hello.ingress_id, session, messages.encode(welcome)):
            self._resume(hello.ingress_id, hello.received)

    def _refuse(self, identity: bytes, reason: str) -> None:
        self.counts["refused"] += 1
        self._post("", Session(identity), messages.encode(messages.Refused(reason)))

    def _resume(self, ingress_id: str, received: dict[str, int]) -> None:
        unknown = self._outbox.resume(ingress_id, received)
        session = self._sessions.get(ingress_id)
        if unknown and session is not None:
            self._post(ingress_id, session, messages.encode(messages.Unknown(self.epoch, session.seq, unknown)))
        self._flush(ingress_id)

    # --- time ----------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        for ingress_id, session in list(self._sessions.items()):
            self._flush(ingress_id)
            if now - session.last_load >= self._timings.heartbeat_s * 0.8:
                self._send(ingress_id, session, [])
            session.expire(now)
        if self._cache_feed is not None:
            self._cache_feed.send_due(now, self.epoch, self._sessions, self._post)
        self._outbox.forget(self._outbox.ended_before(now - self._timings.keep_ended_s))
        for ingress_id in self._outbox.ingresses() - self._sessions.keys():
            since = self._absent_since.setdefault(ingress_id, now)
            if now - since > self._timings.absent_ingress_s:
                for request_id in self._outbox.live_of(ingress_id):
                    self._on_abort(request_id)

    def _drop_session(self, ingress_id: str) -> None:
        session = self._sessions.pop(ingress_id, None)
        if session is not None:
            self._ingress_of.pop(session.identity, None)


def _changes_load(delta: StreamDelta) -> bool:
    """Return whether the delta has a request's first token, so that its prefill is done, or its end."""
    return delta.finish_reason is not None or (delta.start == 0 and bool(delta.token_ids))
