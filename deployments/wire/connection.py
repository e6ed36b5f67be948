"""The ingress's end of the wire: one link per replica, read from the ingress's event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from deployments.wire import messages
from deployments.wire.handshake import Context
from deployments.wire.link import DealerLink, OpenLink
from deployments.wire.messages import Load
from deployments.wire.turn_budget import TURN_BLOCKS, TurnBudget
from engine.base.awake_clock import AwakeClock
from engine.values.stream_delta import StreamDelta
from router.addresses import ReplicaAddress

logger = logging.getLogger("ray.serve")


RESYNC_S = 3.0
"""Seconds after which a requested part of a snapshot counts as lost, and a new snapshot is requested."""
TURN_MESSAGES = 64
"""Messages of one replica that are handled before other work of the event loop."""
HELLO_S = 0.5
"""Seconds of silence after which an ingress says hello again."""
SILENT_HELLOS = 5
"""Hellos without any answer after which an ingress reconnects under another identity: its connection may be half
open, and after a failed handshake ZeroMQ does not retry.
"""

_hello_numbers = itertools.count(1)  # not the clock, which may step back


class WireListener(Protocol):
    """Receives a connection's messages. All methods are called on the event loop."""

    def on_deltas(self, replica: str, deltas: list[StreamDelta]) -> None:
        """Handle new tokens."""
        ...

    def on_unknown(self, replica: str, request_ids: list[str]) -> None:
        """Handle streams that the replica does not know."""
        ...

    def on_not_run(self, replica: str, message: messages.NotRun) -> None:
        """Handle a request that the replica refused, or cannot continue."""
        ...

    def on_found(self, replica: str, message: messages.Found) -> None:
        """Handle a replica's answer to `Find`."""
        ...

    def unanswered(self, replica: str) -> Iterable[messages.Generate | messages.TakeOver]:
        """Return the requests sent to that replica to which it has not answered, in the order sent."""
        ...

    def on_prefix_delta(self, name: str, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """Handle a change of a replica's cache, or of the store with that name, as block hashes."""
        ...

    def on_prefix_tiers(self, name: str, hashes: Sequence[int], tiers: bytes) -> None:
        """Handle the fastest tier of each of some blocks that the cache holds, a byte each."""
        ...

    def on_prefix_snapshot(
        self, name: str, hashes: Sequence[int], block_tokens: int, *, is_first: bool, is_last: bool
    ) -> None:
        """Handle one part of the block hashes that a replica's cache, or the store with that name, holds. The
        first part replaces all known ones.

        Ask for the next one with `WireConnection.ask_for_prefixes` when there is time for it.
        """
        ...

    def on_prefixes_unknown(self, replica: str, name: str) -> None:
        """Handle that the known contents of a replica's cache, or of the store with that name, may be incomplete,
        as if no part of a snapshot had come yet.
        """
        ...

    def on_load(self, replica: str, load: Load) -> None:
        """Handle the replica's current load."""
        ...

    def on_answering(self, replica: str, is_answering: bool) -> None:
        """Handle that the replica was silent for too long, or answers (again)."""
        ...

    def received(self, replica: str) -> Mapping[str, int]:
        """Return the number of tokens received of each unfinished stream at that replica."""
        ...


@dataclass(slots=True)
class _Learned:
    """The state of what is known of a replica's cache or store."""

    name: str
    """Of the replica, or of the store from which it reads."""
    snapshot: Literal["unknown", "begun", "whole"] = "unknown"
    asked_at: float | None = None
    """Awake time at which the missing part of a snapshot was requested."""


class WireConnection:
    """One ingress's connection to one replica. Sends hellos until answered, and again after each silence."""

    def __init__(
        self,
        context: Context,
        address: ReplicaAddress,
        ingress_id: str,
        listener: WireListener,
        clock: Callable[[], float],
        lost_after_s: float = 3.0,
        model: str = "",
        budget: TurnBudget | None = None,
        open_link: OpenLink = DealerLink,
    ) -> None:
        """`model` is the fingerprint of the model that this ingress tokenizes for; "" is not checked. All
        connections of an ingress share a `budget`.
        """
        self.address = address
        self.load = Load()
        self.is_answering = False
        self.last_message_at: float | None = None
        """Clock at the last message; None before the first."""
        self.cache_known_at = clock()
        """Clock of the last message while its cache, or the hottest part of it, is known here; before that, the
        clock at which it connected.
        """
        self.counts: Counter[str] = Counter()
        """Numbers of dropped messages and detected gaps, by kind."""
        self._ingress_id, self._listener = ingress_id, listener
        self._clock, self._lost_after_s = clock, lost_after_s
        self._last_hello = clock()
        # A replica's messages to a suspended process arrive later, because ZeroMQ's thread is suspended too.
        self._awake = AwakeClock(clock)
        self._heard_at = self._awake.now()
        self._num_silent = 0  # hellos since the last message
        self._was_lost = False
        self._hello_number = 0  # of the last hello
        self._is_welcome = False  # whether a welcome has come since the last hello
        self._proof: int | None = None  # number of the first hello whose answer proves that the replica lives
        self._model = model
        self._epoch, self._next_seq = -1, 0
        self._block_tokens = self._version = 0
        self._cache, self._store = _Learned(address.replica), _Learned(address.store)
        self._budget = budget or TurnBudget(TURN_BLOCKS)
        self._loop = asyncio.get_running_loop()
        self._link = open_link(context, address, self.receive_all)
        self.hello()

    def hello(self) -> None:
        """Introduce this ingress; the replica then sends all tokens again that were not received."""
        self._last_hello = self._clock()
        self._num_silent += 1
        self._hello_number, self._is_welcome = next(_hello_numbers), False
        received = dict(self._listener.received(self.address.replica))
        self._send(
            messages.Hello(messages.WIRE_VERSION, self._hello_number, self._ingress_id, self._model, received)
        )

    def abort(self, request_id: str) -> None:
        """Abort a request in the engine."""
        self._send(messages.Abort(request_id))

    def detach(self, request_id: str) -> None:
        """Have the engine generate a resumable request further, without a reader."""
        self._send(messages.Detach(request_id))

    def find(self, name: str, tenant: str) -> None:
        """Ask for the requests of a tenant's resumable stream that the replica has."""
        self._send(messages.Find(name, tenant))

    @property
    def keeps_streams(self) -> bool | None:
        """Whether the replica knows resumable streams, which those of the last release do not; None before its
        first answer.
        """
        return self._version >= messages.RESUMABLE_SINCE if self._version else None

    def generate(self, request: messages.Generate | messages.TakeOver) -> bool:
        """Send a request, or take it over. Return False when it cannot be sent, because the replica does not read
        messages.

        Raises ValueError for a request that is larger than a message may be.
        """
        return self._send(request)

    def tell_backlog(self, backlog: messages.Backlog) -> None:
        """Report this ingress's backlog."""
        self._send(backlog)

    @property
    def is_lost(self) -> bool:
        """Whether the replica died, refused this ingress or was silent too long, and has not answered since."""
        return self._was_lost

    @property
    def is_synced(self) -> bool:
        """Whether all prefixes in the replica's cache are known here."""
        return self._cache.snapshot == "whole"

    @property
    def knows_hottest(self) -> bool:
        """Whether the most recently used prefixes of the replica's cache are known here, and all changes since."""
        return self._cache.snapshot != "unknown"

    def ask_for_prefixes(self, *, is_store: bool = False) -> None:
        """Ask for the next part of the snapshot of the cache, or of the store from which the replica reads."""
        learned = self._store if is_store else self._cache
        learned.asked_at = self._awake.now()
        is_begun = learned.snapshot != "unknown"
        self._send(messages.NextPart(is_store) if is_begun else messages.Resync(is_store))

    def resume(self, received: dict[str, int]) -> None:
        """Request that streams be sent again from the tokens received."""
        self.counts["resumed"] += len(received)
        self._send(messages.Resume(received))

    def receive_all(self) -> None:
        """Handle arrived messages; yield to the event loop after a turn, and when the turn's budget is spent."""
        for _ in range(TURN_MESSAGES):
            if self._budget.is_spent:
                break
            if (data := self._link.receive()) is None:
                return
            try:
                message = messages.decode_to_ingress(data)
            except messages.MalformedMessage:
                self.counts["malformed"] += 1
                continue
            self._num_silent = 0
            self._handle(message)
        self._loop.call_soon(self.receive_all)

    def tick(self) -> None:
        """Say hello again after silence, and until welcomed; detect the loss of a replica. Call it a few times a
        second.
        """
        self.receive_all()
        if self._link.is_closed:
            return
        now, awake_s = self._clock(), self._awake.now()
        silence = awake_s - self._heard_at
        # After a hello, a replica reports no change of its cache until the ingress, once welcomed, asks for it.
        if (silence > HELLO_S or not self._is_welcome) and now - self._last_hello > HELLO_S:
            if self._num_silent >= SILENT_HELLOS:
                self._reconnect()
            self.hello()
        if silence > self._lost_after_s:
            self.suspect()
        elif self.is_answering:
            for learned in (self._cache, self._store):
                if learned.asked_at is not None and awake_s - learned.asked_at > RESYNC_S:
                    self._lose(learned)

    def suspect(self) -> None:
        """Treat the replica as lost until its next message."""
        if not self._was_lost:
            self._was_lost, self.is_answering = True, False
            self._listener.on_answering(self.address.replica, False)

    def doubt(self) -> None:
        """Treat the replica as lost, as its process is reported gone, until it answers a later hello.

        Its earlier messages are dropped, because they prove nothing.
        """
        self.suspect()
        self.hello()
        self._proof = self._hello_number

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._link.close()

    def _reconnect(self) -> None:
        """Connect under a new identity. Unanswered messages are sent again after the replica's welcome."""
        if not self._was_lost:
            logger.warning(
                "replica %s at %s has not answered %d hellos; reconnecting. If this continues, check that the "
                "ingress reaches the wire's port, and that both run the same version",
                self.address.replica,
                self.address.endpoint,
                self._num_silent,
            )
        self._num_silent = 0
        self.counts["renewed"] += 1
        self._link.reconnect()

    def _handle(self, message: messages.ToIngress) -> None:
        if self._proof is not None and not self._has_proof(message):
            return
        if isinstance(message, messages.Refused):
            self._refuse(message.reason)
            return
        if not self._is_next(message):
            return
        self.last_message_at, self._heard_at = self._clock(), self._awake.now()
        if not self.is_answering:
            self.is_answering, self._was_lost = True, False
            self._listener.on_answering(self.address.replica, True)
        if isinstance(message, (messages.Tokens, messages.Heartbeat)) and message.load is not None:
            self.load = message.load
            self._listener.on_load(self.address.replica, message.load)
        if isinstance(message, messages.Tokens):
            self._listener.on_deltas(self.address.replica, message.deltas)
        elif isinstance(message, messages.Unknown):
            self._listener.on_unknown(self.address.replica, message.request_ids)
        elif isinstance(message, messages.NotRun):
            self._listener.on_not_run(self.address.replica, message)
        elif isinstance(message, messages.Found):
            self._listener.on_found(self.address.replica, message)
        elif isinstance(message, messages.Welcome):
            self._send_unanswered()
            self._lose_prefixes()
        elif isinstance(message, (messages.PrefixSnapshot, messages.PrefixDelta)):
            self._take_prefixes(message)
        # Messages arrive in order, so each one also confirms that all earlier changes of the cache are known.
        if self.knows_hottest:
            self.cache_known_at = self.last_message_at

    def _has_proof(self, message: messages.ToIngress) -> bool:
        """Return whether a message was sent after the replica was reported gone."""
        if not isinstance(message, messages.Welcome) or message.hello < (self._proof or 0):
            return False
        logger.warning("replica %s answers, although its process was reported gone", self.address.replica)
        self._proof = None
        return True

    def _is_next(self, message: messages.Sequenced) -> bool:
        """Return whether to handle a message: not one that is old or of another epoch.

        A gap means lost messages, so all streams and a snapshot are requested again. A welcome restarts the count.
        """
        if isinstance(message, messages.Welcome):
            return self._welcome(message)
        if message.epoch != self._epoch:
            self.counts["epoch"] += 1
            return False
        if message.seq < self._next_seq:
            self.counts["replayed"] += 1
            return False
        if message.seq > self._next_seq:
            self.counts["gaps"] += 1
            received = dict(self._listener.received(self.address.replica))
            if received:
                self.resume(received)
            self._send_unanswered()
            self._lose_prefixes()
        self._next_seq = message.seq + 1
        return True

    def _welcome(self, message: messages.Welcome) -> bool:
        if message.version < messages.OLDEST_WIRE_VERSION:
            expected_version = f"this ingress expects at least version {messages.OLDEST_WIRE_VERSION}"
            self._refuse(f"the replica has wire version {message.version}, {expected_version}")
            return False
        expected = self.address.epoch
        if expected is not None and message.epoch != expected:
            self._refuse(f"the replica has epoch {message.epoch}, but epoch {expected} was advertised")
            return False
        if self._model and message.model and message.model != self._model:
            self._refuse(
                f"the replica runs model {message.model}, but this ingress serves {self._model}: they loaded "
                "different files, which engine.model_revision prevents for a model from the hub"
            )
            return False
        self._epoch, self._next_seq = message.epoch, message.seq + 1
        self._is_welcome = True  # also for an earlier hello: a busy replica may answer late
        self._block_tokens, self._version = message.block_tokens, message.version
        return True

    def _refuse(self, reason: str) -> None:
        self.counts["refused"] += 1
        if not self._was_lost:
            logger.error("the connection to replica %s was refused: %s", self.address.replica, reason)
        self.suspect()

    def _take_prefixes(self, message: messages.PrefixSnapshot | messages.PrefixDelta) -> None:
        learned = self._store if message.is_store else self._cache
        name = learned.name
        try:
            if isinstance(message, messages.PrefixDelta):
                if learned.snapshot != "unknown":  # otherwise the coming snapshot contains it
                    stored, evicted = (
                        messages.unpack_hashes(message.stored),
                        messages.unpack_hashes(message.evicted),
                    )
                    self._budget.spend(len(stored) + len(evicted) + len(message.tiers))
                    self._listener.on_prefix_delta(name, stored, evicted)
                    self._take_tiers(name, message.moved, message.tiers)
                return
            hashes, is_first, is_last = messages.unpack_hashes(message.hashes), message.is_first, message.is_last
            if not is_first and learned.snapshot != "begun":
                return  # it belongs to an abandoned snapshot
            self._budget.spend(len(hashes))
            learned.asked_at, learned.snapshot = None, "whole" if is_last else "begun"
            self._listener.on_prefix_snapshot(name, hashes, self._block_tokens, is_first=is_first, is_last=is_last)
            self._take_tiers(name, message.hashes, message.tiers)
        except messages.MalformedMessage:
            self.counts["malformed"] += 1
            self._lose(learned)

    def _take_tiers(self, name: str, hashes: bytes, tiers: bytes) -> None:
        if tiers:
            tiers = messages.unpack_tiers(tiers, hashes)
            self._listener.on_prefix_tiers(name, messages.unpack_hashes(hashes), tiers)

    def _send_unanswered(self) -> None:
        """Send again all messages that the replica may not have received, or whose answer may be lost."""
        for request in self._listener.unanswered(self.address.replica):
            self._send(request)

    def _lose_prefixes(self) -> None:
        self._lose(self._cache)
        if self._store.name:
            self._lose(self._store)

    def _lose(self, learned: _Learned) -> None:
        learned.snapshot, learned.asked_at = "unknown", None
        self._listener.on_prefixes_unknown(self.address.replica, learned.name)

    def _send(self, message: messages.ToReplica) -> bool:
        if self._link.is_closed:
            return False
        is_sent = self._link.send(messages.encode(message))
        if not is_sent:
            self.counts["congested"] += 1
        return is_sent
