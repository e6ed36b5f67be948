"""Sends a replica's messages to its ingresses: their unsent tokens, the engine's load, heartbeats.

A session lasts from an ingress's hello to its next one, or to the end of its connection. Its messages are
numbered, so that an ingress notices a lost one. Tokens that cannot be sent now stay in the outbox.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import zmq
from msgspec import structs

from deployments.wire import messages
from deployments.wire.handshake import Socket
from deployments.wire.messages import Load
from deployments.wire.outbox import Outbox
from deployments.wire.session import Session
from engine.values.stream_delta import StreamDelta


class Sender:
    """Writes to a ROUTER socket. Not thread-safe: its owner holds the socket's lock."""

    def __init__(
        self,
        socket: Socket,
        epoch: int,
        outbox: Outbox,
        heartbeat_s: float,
        engine_load: Callable[[], Load],
        counts: Counter[str],
        on_end: Callable[[str], None],
    ) -> None:
        """`counts` counts "congested"; `on_end` is called with each ingress whose session has ended."""
        self._socket, self._epoch, self._outbox, self._heartbeat_s = socket, epoch, outbox, heartbeat_s
        self._engine_load, self._counts, self._on_end = engine_load, counts, on_end
        self.sessions: dict[str, Session] = {}
        """The sessions by ingress. Only `begin` and `end` change it."""
        self.last_load, self._load_read_at = Load(), -math.inf
        self._ingress_of: dict[bytes, str] = {}  # identity of a connection -> ingress
        self._is_closed = False

    def ingress_of(self, identity: bytes) -> str | None:
        """Return the ingress that uses this connection; None before it has said hello."""
        return self._ingress_of.get(identity)

    def begin(self, ingress_id: str, identity: bytes, hello_number: int) -> Session:
        """Begin an ingress's session, and end its earlier one. A connection belongs to one ingress."""
        self.end(ingress_id)
        self.end(self._ingress_of.get(identity, ""))
        self.sessions[ingress_id] = session = Session(identity, hello_number)
        self._ingress_of[identity] = ingress_id
        return session

    def end(self, ingress_id: str) -> None:
        """End an ingress's session. There may be none."""
        session = self.sessions.pop(ingress_id, None)
        if session is not None:
            self._ingress_of.pop(session.identity, None)
            self._on_end(ingress_id)

    def flush(self, ingress_id: str, now: float) -> None:
        """Send an ingress a message of unsent tokens. Those that do not fit into it, and those that cannot be sent
        now, stay in the outbox until the next one.
        """
        session = self.sessions.get(ingress_id)
        if session is None:
            return
        deltas = self._outbox.unsent(ingress_id)
        if deltas and self._send(ingress_id, session, deltas, now):
            self._outbox.mark_sent(ingress_id, deltas)

    def beat(self, now: float) -> None:
        """Send each ingress its unsent tokens, and a heartbeat when its view of the load becomes old."""
        for ingress_id, session in list(self.sessions.items()):
            self.flush(ingress_id, now)
            if now - session.last_load >= self._heartbeat_s * 0.8:
                self._send(ingress_id, session, [], now)

    def post(self, ingress_id: str, session: Session, data: bytes) -> bool:
        """Send a message with the session's next number. Return False when that is impossible now, or forever."""
        if self._is_closed:
            return False
        try:
            self._socket.send(session.identity, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            self._counts["congested"] += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.end(ingress_id)
            return False
        session.seq += 1
        return True

    def close(self) -> None:
        """Stop sending. The socket belongs to the owner."""
        self._is_closed = True

    def _send(self, ingress_id: str, session: Session, deltas: list[StreamDelta], now: float) -> bool:
        """Send deltas, with the load when it is due, or a heartbeat when there are none."""
        is_due = now - session.last_load >= self._heartbeat_s / 2 or any(map(_changes_load, deltas))
        load = self._load(ingress_id, session, now) if is_due or not deltas else None
        message: messages.ToIngress
        if load is None or deltas:
            message = messages.Tokens(self._epoch, session.seq, deltas, load)
        else:
            message = messages.Heartbeat(self._epoch, session.seq, load)
        is_sent = self.post(ingress_id, session, messages.encode(message))
        if is_sent and load is not None:
            session.last_load = now
        return is_sent

    def _load(self, ingress_id: str, session: Session, now: float) -> Load:
        """Return the engine's load for that ingress. It is read once for all that receive it at `now`."""
        if self._load_read_at != now:
            self.last_load, self._load_read_at = self._engine_load(), now
        return structs.replace(
            self.last_load,
            num_requests=self._outbox.num_live,
            num_own=self._outbox.num_live_of(ingress_id),
            dispatches_seen=session.dispatches_seen,
        )


def _changes_load(delta: StreamDelta) -> bool:
    """Return whether the delta has a request's first token, so that its prefill is done, or its end."""
    return delta.finish_reason is not None or (delta.start == 0 and bool(delta.token_ids))
