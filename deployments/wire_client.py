"""The ingress's end of the wire: one DEALER socket per replica, read from the ingress's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import zmq

from deployments import wire
from deployments.sockets import Context, connect_dealer, descriptor, is_readable
from deployments.wire import Load, Output
from router.fleet import ReplicaAddress

logger = logging.getLogger("ray.serve")


class WireListener(Protocol):
    """Who hears what a connection brings; all calls come on the event loop."""

    def on_outputs(self, replica: str, outputs: list[Output]) -> None:
        """Tokens came."""
        ...

    def on_unknown(self, replica: str, request_ids: list[str]) -> None:
        """The replica does not know these streams."""
        ...

    def on_load(self, replica: str, load: Load) -> None:
        """Load news came."""
        ...

    def on_answering(self, replica: str, is_answering: bool) -> None:
        """The replica fell silent for too long, or answers (again)."""
        ...

    def received(self, replica: str) -> Mapping[str, int]:
        """Tokens received of every unfinished stream at that replica."""
        ...


class WireConnection:
    """One ingress's connection to one replica. Says hello until answered, and again after each silence."""

    def __init__(
        self,
        context: Context,
        address: ReplicaAddress,
        ingress_id: str,
        listener: WireListener,
        clock: Callable[[], float],
        lost_after_s: float = 3.0,
    ) -> None:
        self.address = address
        self.load = Load()
        self.is_answering = False
        self.last_heard: float | None = None
        """Clock at the last message; None before the first."""
        self.counts: Counter[str] = Counter()
        """Messages dropped and gaps noticed, by kind."""
        self._ingress_id, self._listener = ingress_id, listener
        self._clock, self._lost_after_s = clock, lost_after_s
        self._opened = self._last_hello = clock()
        self._was_lost = False
        self._epoch, self._next_seq = 0, 0
        self._socket = connect_dealer(context, address.endpoint)
        self._loop = asyncio.get_running_loop()
        self._fd = descriptor(self._socket)
        self._loop.add_reader(self._fd, self.receive_all)
        self.hello()

    def hello(self) -> None:
        """Introduce this ingress; the replica sends again what it has beyond what was received."""
        self._last_hello = self._clock()
        received = dict(self._listener.received(self.address.replica))
        self._send(wire.Hello(wire.WIRE_VERSION, self.address.secret, self._ingress_id, received))

    def abort(self, request_id: str) -> None:
        """End a request in the engine."""
        self._send(wire.Abort(request_id))

    def resume(self, received: dict[str, int]) -> None:
        """Ask for streams again, from where they broke off."""
        self.counts["resumed"] += len(received)
        self._send(wire.Resume(received))

    def receive_all(self) -> None:
        """Handle every message that has come."""
        while is_readable(self._socket):
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = wire.decode_to_ingress(data)
            except wire.MalformedMessage:
                self.counts["malformed"] += 1
                continue
            self._handle(message)

    def tick(self) -> None:
        """Call a few times a second: says hello again after silence, notices that a replica is lost."""
        self.receive_all()
        if self._socket.closed:
            return
        now = self._clock()
        silence = now - (self._opened if self.last_heard is None else self.last_heard)
        if silence > 0.5 and now - self._last_hello > 0.5:
            self.hello()
        if silence > self._lost_after_s:
            self.suspect()

    def suspect(self) -> None:
        """The replica counts as lost until it is heard of again."""
        if not self._was_lost:
            self._was_lost, self.is_answering = True, False
            self._listener.on_answering(self.address.replica, False)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=200)

    def _handle(self, message: wire.ToIngress) -> None:
        if isinstance(message, wire.Refused):
            self.counts["refused"] += 1
            logger.error("replica %s refused this ingress: %s", self.address.replica, message.reason)
            return
        self.last_heard = self._clock()
        if not self.is_answering:
            self.is_answering, self._was_lost = True, False
            self._listener.on_answering(self.address.replica, True)
        self._check_sequence(message)
        if isinstance(message, wire.Welcome):
            return
        if isinstance(message, wire.Unknown):
            self._listener.on_unknown(self.address.replica, message.request_ids)
            return
        if message.load is not None:
            self.load = message.load
            self._listener.on_load(self.address.replica, message.load)
        if isinstance(message, wire.Tokens):
            self._listener.on_outputs(self.address.replica, message.outputs)

    def _check_sequence(self, message: wire.Welcome | wire.Tokens | wire.Heartbeat | wire.Unknown) -> None:
        """A gap means lost messages: ask for all streams again. A welcome begins a new count."""
        if not isinstance(message, wire.Welcome) and (message.epoch, message.seq) != (self._epoch, self._next_seq):
            self.counts["gaps"] += 1
            received = dict(self._listener.received(self.address.replica))
            if received:
                self.resume(received)
        self._epoch, self._next_seq = message.epoch, message.seq + 1

    def _send(self, message: wire.ToReplica) -> None:
        if self._socket.closed:
            return
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.counts["congested"] += 1
        # Sending may swallow the signal that something came in.
        self._loop.call_soon(self.receive_all)
