"""What one process knows of the engine replicas: who they are, where, how busy, and what it sent them itself.

Serve's router runs in another thread than the ingress's code, and its class is pickled by value, so its module's
globals are a private copy. This module is imported by both and is where they meet: `fleet_of` is the one piece of
module state, a table with one fleet per deployment.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.placement import Reason


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """How to reach a replica's wire."""

    replica: str
    endpoint: str
    """ZeroMQ address, "tcp://host:port"."""
    secret: str
    """What a hello must bear; new with every start of a replica."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's load as its last heartbeat told."""

    num_requests: int = 0
    """Requests waiting or running in it, of all ingresses."""
    num_own: int = 0
    """Those of them that came from this process."""


@dataclass(slots=True)
class _Member:
    address: ReplicaAddress | None = None
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    is_lost: bool = False
    own: set[str] = field(default_factory=set)


class Fleet:
    """Thread-safe. Every method is a few dictionary operations: callable from any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}
        self._placed: dict[str, str | None] = {}  # open request id -> replica
        self._decisions: Counter[str] = Counter()
        self._listeners: list[Callable[[], None]] = []

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
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.remove(listener)

        return unsubscribe

    def mark_lost(self, replica: str, is_lost: bool = True) -> None:
        """A replica stopped answering (or answers again): it is tried last until then."""
        with self._lock:
            if replica in self._members:
                self._members[replica].is_lost = is_lost

    # --- load ----------------------------------------------------------------------------------------------

    def record_load(self, replica: str, load: ReplicaLoad) -> None:
        """A heartbeat came."""
        with self._lock:
            if replica in self._members:
                self._members[replica].load = load

    def open(self, request_id: str) -> None:
        """This process is about to send a request. Until `release`, wherever it is booked it counts as load."""
        with self._lock:
            self._placed[request_id] = None

    def book(self, request_id: str, replica: str) -> None:
        """An open request goes to `replica`: it counts there at once, before any heartbeat knows of it.

        Nothing happens when it has been released meanwhile: the router may be slower than a client's cancel.
        """
        with self._lock:
            before = self._placed.get(request_id, replica)
            if request_id not in self._placed or before == replica:
                return
            if before in self._members:
                self._members[before].own.discard(request_id)
            if replica in self._members:
                self._members[replica].own.add(request_id)
                self._placed[request_id] = replica

    def placement(self, request_id: str) -> str | None:
        """Where an open request was booked last."""
        return self._placed.get(request_id)

    def release(self, request_id: str) -> None:
        """The request has ended, however it did."""
        with self._lock:
            replica = self._placed.pop(request_id, None)
            if replica in self._members:
                self._members[replica].own.discard(request_id)

    def loads(self) -> dict[str, float]:
        """Requests at each replica: what others sent (from its heartbeat) and what this process sent (exact)."""
        with self._lock:
            return {
                replica: max(0, m.load.num_requests - m.load.num_own) + len(m.own)
                for replica, m in self._members.items()
            }

    def lost(self) -> frozenset[str]:
        """Replicas that do not answer."""
        with self._lock:
            return frozenset(replica for replica, m in self._members.items() if m.is_lost)

    # --- decisions -----------------------------------------------------------------------------------------

    def count(self, reason: Reason) -> None:
        """A request was placed for this reason."""
        with self._lock:
            self._decisions[reason] += 1

    def decisions(self) -> dict[str, int]:
        """Placements by reason since the process started."""
        with self._lock:
            return dict(self._decisions)


_fleets: dict[str, Fleet] = {}
_fleets_lock = threading.Lock()


def fleet_of(app: str, deployment: str) -> Fleet:
    """This process's fleet of a deployment, made on first use."""
    with _fleets_lock:
        return _fleets.setdefault(f"{app}#{deployment}", Fleet())
