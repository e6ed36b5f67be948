"""What one process knows of the engine replicas: their names, addresses and load, and what it sent them itself.

heartbeat (<= 50 ms old)         + what this process sent since
requests, tokens of all ingresses  dispatches that the heartbeat has not seen yet
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

from router.cost import Candidate

DEFAULT_PREFILL_RATE = 5_000.0
"""Tokens/s of a replica while none in the fleet has measured its own."""
CIRCUIT_FAILURES = 3
"""Failed calls in a row after which a replica's circuit opens: it gets nothing while others can serve."""
CIRCUIT_OPEN_S = 5.0
"""For so long; then one more failure opens it again, and one success closes it."""
MemberState = Literal["available", "draining", "lost", "circuit_open"]
"""How a replica is seen here. One whose queue is full is available."""

_Listener = TypeVar("_Listener")


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """How to reach a replica's wire."""

    replica: str
    endpoint: str
    """ZeroMQ address, "tcp://host:port"."""
    secret: str
    """What a hello must bear; new with every start of a replica."""
    epoch: int | None = None
    """Drawn at its start; None when it was not advertised."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's load as its last heartbeat told."""

    num_requests: int = 0
    """Requests waiting, running or on their way to it, of all ingresses."""
    num_own: int = 0
    """Those of them that came from this process."""
    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    """Prompt tokens, probably not cached, of requests waiting, running or on their way to it."""
    dispatches_seen: int = 0
    """Number of this process's last dispatch that the above counts."""
    pages_free: int = 0
    """KV pages that are free or can be evicted."""
    pages_total: int = 0
    page_size: int = 16
    """Tokens."""
    prefill_rate: float = 0.0
    """Measured uncached prefill tokens/s; 0 until measured."""
    prefill_share: float = 0.0
    """Share of the last seconds spent on prefill, 0..1."""
    decode_rate: float = 0.0
    """Measured decoded tokens/s, of all its requests; 0 until measured."""
    evict_price: float = 0.0
    """Seconds of recompute that each token inserted there is likely to cost; 0 while pages are free."""
    is_draining: bool = False
    is_full: bool = False
    """Whether its queue takes no more requests."""
    max_running: int = 0
    """Requests that it runs at once."""
    finish_rate: float = 0.0
    """Requests it finished per second lately."""


@dataclass(slots=True)
class _Member:
    address: ReplicaAddress | None = None
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    is_lost: bool = False
    own: set[str] = field(default_factory=set)
    """Open requests of this process."""
    num_dispatches: int = 0
    unseen: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Own dispatches that no heartbeat counts yet: request id -> (number, uncached tokens)."""
    num_failures: int = 0
    circuit_open_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A request was booked: its replica should tell the other ingresses."""

    replica: str
    number: int
    """Counts the dispatches of this process to that replica, from 1."""
    request_id: str
    num_tokens: int
    """Uncached prompt tokens, as predicted."""


class Fleet:
    """Thread-safe. Every method is a few dictionary operations: callable from any event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}
        self._placed: dict[str, str | None] = {}  # open request id -> replica
        self._listeners: list[Callable[[], None]] = []
        self._on_dispatch: list[Callable[[Dispatch], None]] = []

    # --- members -------------------------------------------------------------------------------------------

    def update(self, addresses: Mapping[str, ReplicaAddress | None]) -> None:
        """The replicas that exist now; None where the address is not known. Listeners hear of a change."""
        with self._lock:
            before = {replica: member.address for replica, member in self._members.items()}
            for replica in self._members.keys() - addresses.keys():
                del self._members[replica]
            for replica, address in addresses.items():
                self._members.setdefault(replica, _Member()).address = address
            listeners = list(self._listeners) if before != dict(addresses) else []
        for listener in listeners:
            listener()

    def addresses(self) -> dict[str, ReplicaAddress]:
        """Replicas whose address is known."""
        with self._lock:
            return {replica: m.address for replica, m in self._members.items() if m.address is not None}

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` from some thread whenever members change; returns what ends that."""
        return _subscribe(self._listeners, listener, self._lock)

    def mark_lost(self, replica: str, is_lost: bool = True) -> None:
        """A replica stopped answering (or answers again): it is tried last until then."""
        with self._lock:
            if replica in self._members:
                self._members[replica].is_lost = is_lost

    def names(self) -> set[str]:
        """Replicas that exist."""
        with self._lock:
            return set(self._members)

    def count_by_state(self) -> dict[MemberState, int]:
        """Replicas in each state, all states included."""
        with self._lock:
            now, counts = self._clock(), dict.fromkeys(get_args(MemberState), 0)
            for member in self._members.values():
                counts[_member_state(member, now)] += 1
            return counts

    def lost(self) -> frozenset[str]:
        """Replicas that do not answer."""
        with self._lock:
            return frozenset(replica for replica, m in self._members.items() if m.is_lost)

    def record_call(self, replica: str, *, is_failure: bool) -> None:
        """A call to a replica succeeded or failed: its circuit opens after some failures in a row."""
        with self._lock:
            member = self._members.get(replica)
            if member is None:
                return
            member.num_failures = member.num_failures + 1 if is_failure else 0
            if member.num_failures >= CIRCUIT_FAILURES:
                member.circuit_open_until = self._clock() + CIRCUIT_OPEN_S

    # --- load ----------------------------------------------------------------------------------------------

    def record_load(self, replica: str, load: ReplicaLoad) -> None:
        """A heartbeat came."""
        with self._lock:
            member = self._members.get(replica)
            if member is None:
                return
            member.load = load
            for request_id, (number, _) in list(member.unseen.items()):
                if number > load.dispatches_seen:
                    break  # numbers ascend
                del member.unseen[request_id]

    def open(self, request_id: str) -> None:
        """This process is about to send a request. Until `release`, wherever it is booked it counts as load."""
        with self._lock:
            self._placed[request_id] = None

    def book(self, request_id: str, replica: str, num_tokens: int = 0) -> None:
        """An open request with so many uncached tokens goes to `replica`: it counts there at once, before any
        heartbeat knows of it.

        Nothing happens when it has been released meanwhile: the router may be slower than a client's cancel.
        """
        with self._lock:
            before = self._placed.get(request_id, replica)
            member = self._members.get(replica)
            if request_id not in self._placed or before == replica:
                return
            if before in self._members:
                self._drop(self._members[before], request_id)
            if member is None:
                return
            self._placed[request_id] = replica
            member.own.add(request_id)
            member.num_dispatches += 1
            member.unseen[request_id] = (member.num_dispatches, num_tokens)
            dispatch = Dispatch(replica, member.num_dispatches, request_id, num_tokens)
            listeners = list(self._on_dispatch)
        for listener in listeners:
            listener(dispatch)

    def on_dispatch(self, listener: Callable[[Dispatch], None]) -> Callable[[], None]:
        """Call `listener` from some thread with every booking; returns what ends that."""
        return _subscribe(self._on_dispatch, listener, self._lock)

    def placement(self, request_id: str) -> str | None:
        """Where an open request was booked last."""
        return self._placed.get(request_id)

    def release(self, request_id: str) -> None:
        """The request has ended, however it did."""
        with self._lock:
            replica = self._placed.pop(request_id, None)
            if replica in self._members:
                self._drop(self._members[replica], request_id)

    def loads(self) -> dict[str, float]:
        """Requests at each replica: what others sent (from its heartbeat) and what this process sent (exact)."""
        with self._lock:
            return {replica: float(_num_requests(member)) for replica, member in self._members.items()}

    def candidates(self, replicas: Collection[str], avoid: Collection[str] = ()) -> list[Candidate]:
        """What is known of each replica; those to `avoid` are not available, like all that cannot serve now."""
        with self._lock:
            now = self._clock()
            rates = [m.load.prefill_rate for m in self._members.values() if m.load.prefill_rate > 0]
            typical = sum(rates) / len(rates) if rates else DEFAULT_PREFILL_RATE
            unknown = _Member()
            members = {replica: self._members.get(replica, unknown) for replica in replicas}
            return [
                _candidate(replica, member, typical, replica not in avoid and _can_serve(member, now))
                for replica, member in members.items()
            ]

    def utilisation(self) -> float:
        """Share of the fleet's prefill capacity in use, 0..1."""
        with self._lock:
            shares = [m.load.prefill_share for m in self._members.values() if not m.is_lost]
            return sum(shares) / len(shares) if shares else 0.0

    def _drop(self, member: _Member, request_id: str) -> None:
        member.own.discard(request_id)
        member.unseen.pop(request_id, None)


def _subscribe(listeners: list[_Listener], listener: _Listener, lock: threading.Lock) -> Callable[[], None]:
    with lock:
        listeners.append(listener)

    def unsubscribe() -> None:
        with lock:
            listeners.remove(listener)

    return unsubscribe


def _num_requests(member: _Member) -> int:
    return max(0, member.load.num_requests - member.load.num_own) + len(member.own)


def _can_serve(member: _Member, now: float) -> bool:
    is_closed = now >= member.circuit_open_until
    return is_closed and not (member.is_lost or member.load.is_draining or member.load.is_full)


def _member_state(member: _Member, now: float) -> MemberState:
    if member.is_lost:
        return "lost"
    if member.load.is_draining:
        return "draining"
    return "circuit_open" if now < member.circuit_open_until else "available"


def _candidate(replica: str, member: _Member, typical_rate: float, is_available: bool) -> Candidate:
    load = member.load
    return Candidate(
        replica=replica,
        queued_prefill_tokens=load.queued_prefill_tokens + sum(tokens for _, tokens in member.unseen.values()),
        num_running=_num_requests(member),
        pages_free=load.pages_free,
        pages_total=load.pages_total,
        evict_price=load.evict_price,
        prefill_rate=load.prefill_rate or typical_rate,
        decode_tokens_per_s=load.decode_rate,
        is_available=is_available,
        page_size=load.page_size,
        max_running=load.max_running,
        finish_rate=load.finish_rate,
    )
