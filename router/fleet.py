"""The engine replicas as one process knows them: names, addresses, load, and what this process sent to each.

A replica's load is the sum of two parts:

    its last heartbeat (at most 50 ms old)    +    what this process has sent it since
    requests and tokens of all ingresses           dispatches that no heartbeat counts yet
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import takewhile
from typing import get_args

from router.addresses import KVAddress, ReplicaAddress
from router.candidates import Candidates
from router.member import Member, MemberState, ReplicaLoad
from router.ready_candidates import ExactMean, ReadyCandidates

CIRCUIT_FAILURES = 3
"""Failed calls in a row after which a replica's circuit opens: it gets nothing while others can serve."""
CIRCUIT_OPEN_S = 5.0
"""How long a circuit stays open; then one more failure opens it again, and one success closes it."""
MOST_STALE = 8
"""Replicas that may have changed since the last prompt before their candidates are rebuilt without one."""


class Fleet:
    """The replicas of one model. Thread-safe; every method is a few dictionary operations and never waits.

    A replica's candidate is rebuilt after its state has changed, not for each prompt, because a prompt considers
    all replicas, perhaps hundreds. As one request changes its replica several times, the rebuild waits for the
    next prompt, unless that would find many changed replicas.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._members: dict[str, Member] = {}
        self._placed: dict[str, str | None] = {}  # open request id -> replica
        self._deferrable: set[str] = set()  # open requests that yield to all others
        self._listeners: list[Callable[[], None]] = []
        self.version = 0
        """Grows whenever a replica joins, leaves, moves, becomes silent, fails, or returns."""
        self._ready = ReadyCandidates()
        self._stale: dict[str, None] = {}
        """Replicas whose candidates must be rebuilt, the first change first."""
        self._open_circuits: set[str] = set()
        self._kv_tokens = 0
        self._fetch_rates = ExactMean()
        self._lenders: tuple[int, Mapping[str, KVAddress]] | None = None
        """The result of `lenders` at this version."""
        self._stores: tuple[int, Mapping[str, str]] = (-1, {})
        """The result of `stores` at a version."""
        self._roles: tuple[int, dict[str, frozenset[str]]] = (-1, {})
        """The result of `with_role` at a version."""

    # --- members -------------------------------------------------------------------------------------------

    def update(self, addresses: Mapping[str, ReplicaAddress | None], deployment: str = "") -> None:
        """Replace the known replicas of one deployment; None stands for an unknown address. Listeners are called
        after a change.
        """
        with self._lock:
            known = self._members.items()
            before = {replica: member.address for replica, member in known if member.deployment == deployment}
            for replica in before.keys() - addresses.keys():
                self._kv_tokens -= self._members.pop(replica).kv_tokens
                self._open_circuits.discard(replica)
                self._stale.pop(replica, None)
                self._ready.remove(replica)
                self._fetch_rates.put(replica, None)
            for replica, address in addresses.items():
                if replica in self._members:
                    self._members[replica].address = address
                else:
                    self._members[replica] = Member(address, deployment)
                    self._change(replica)
            has_changed = before != dict(addresses)
            self.version += has_changed
            listeners = list(self._listeners) if has_changed else []
        for listener in listeners:
            listener()

    def addresses(self) -> dict[str, ReplicaAddress]:
        """Return the replicas whose address is known."""
        with self._lock:
            return {replica: m.address for replica, m in self._members.items() if m.address is not None}

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener`, from any thread, whenever members change; return the function that unsubscribes it."""
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.remove(listener)

        return unsubscribe

    def mark_lost(self, replica: str, is_lost: bool = True) -> None:
        """Note that a replica stopped answering, or answers again. A lost replica is tried last."""
        with self._lock:
            member = self._members.get(replica)
            if member is not None and member.is_lost != is_lost:
                member.is_lost = is_lost
                self.version += 1
                self._change(replica)

    def has(self, replica: str) -> bool:
        """Return whether there is a replica of this name."""
        return replica in self._members

    def names(self) -> set[str]:
        """Return the names of all replicas."""
        with self._lock:
            return set(self._members)

    def count_by_state(self) -> dict[MemberState, int]:
        """Count the replicas in each state; states without replicas count 0."""
        with self._lock:
            now, counts = self._clock(), dict.fromkeys(get_args(MemberState), 0)
            for member in self._members.values():
                counts[member.state(now)] += 1
            return counts

    def lost(self) -> frozenset[str]:
        """Return the replicas that do not answer, or whose engines fail."""
        with self._lock:
            return frozenset(replica for replica, m in self._members.items() if m.is_out)

    def draining(self) -> frozenset[str]:
        """Return the replicas that are about to leave."""
        with self._lock:
            return frozenset(replica for replica, m in self._members.items() if m.load.is_draining)

    def record_call(self, replica: str, *, is_failure: bool) -> None:
        """Note that a call to a replica succeeded or failed. CIRCUIT_FAILURES in a row open its circuit."""
        with self._lock:
            member = self._members.get(replica)
            if member is None:
                return
            member.num_failures = member.num_failures + 1 if is_failure else 0
            if member.num_failures >= CIRCUIT_FAILURES:
                member.circuit_open_until = self._clock() + CIRCUIT_OPEN_S
                self._open_circuits.add(replica)
                self._change(replica)

    # --- load ----------------------------------------------------------------------------------------------

    def record_load(self, replica: str, load: ReplicaLoad) -> None:
        """Store a heartbeat."""
        with self._lock:
            member = self._members.get(replica)
            if member is None:
                return
            self._kv_tokens -= member.kv_tokens
            self.version += load.failing != member.load.failing
            if load.fetch_rate != member.load.fetch_rate:
                self._fetch_rates.put(replica, load.fetch_rate or None)
            member.load = load
            self._kv_tokens += member.kv_tokens
            is_seen = lambda dispatch: dispatch[1][0] <= load.dispatches_seen  # noqa: E731  # numbers ascend
            for request_id, _ in list(takewhile(is_seen, member.unseen.items())):
                member.see(request_id)
            self._change(replica)

    def open(self, request_id: str, *, is_deferrable: bool = False) -> None:
        """Announce a request that this process is about to send. It counts as load where it is booked, until
        `release`. A deferrable one yields to all others, and is no load to them.
        """
        with self._lock:
            if is_deferrable:
                self._deferrable.add(request_id)
            self._placed[request_id] = None

    def book(self, request_id: str, replica: str, num_tokens: int = 0) -> None:
        """Count an open request with `num_tokens` uncached tokens at `replica`, before any heartbeat includes it.

        Does nothing when the request was released meanwhile: a client may cancel before the router has decided.
        """
        with self._lock:
            before = self._placed.get(request_id, replica)
            member = self._members.get(replica)
            if request_id not in self._placed or before == replica:
                return
            if before in self._members:
                self._drop(before, request_id)
            if member is None:
                return
            self._placed[request_id] = replica
            member.own.add(request_id)
            if request_id in self._deferrable:
                member.own_deferrable.add(request_id)
                num_tokens = 0
            member.num_dispatches += 1
            member.unseen[request_id] = (member.num_dispatches, num_tokens)
            member.num_unseen_tokens += num_tokens
            self._change(replica)

    def dispatch_number(self, request_id: str) -> int:
        """Return the number of an open request among those booked at its replica, from 1; 0 if it has none."""
        with self._lock:
            member = self._members.get(self._placed.get(request_id) or "")
            return 0 if member is None else member.unseen.get(request_id, (0, 0))[0]

    def placement(self, request_id: str) -> str | None:
        """Return the replica at which an open request was booked last, or None."""
        return self._placed.get(request_id)

    def release(self, request_id: str) -> None:
        """Forget a request that has ended, for any reason."""
        with self._lock:
            self._deferrable.discard(request_id)
            replica = self._placed.pop(request_id, None)
            if replica in self._members:
                self._drop(replica, request_id)

    @property
    def num_open(self) -> int:
        """Number of requests that were announced and not released."""
        return len(self._placed)

    def loads(self) -> dict[str, float]:
        """Count the requests at each replica: others' as of its heartbeat, those of this process exactly."""
        with self._lock:
            return {replica: float(member.num_requests) for replica, member in self._members.items()}

    def candidates(self, replicas: Collection[str], avoid: Collection[str] = ()) -> Candidates:
        """Return the candidates of `replicas`. Those to `avoid` are marked unavailable, as are all that cannot
        serve now.
        """
        with self._lock:
            self._close_circuits()
            return self._make_ready().of(replicas, avoid)

    def shortest_queue(self) -> tuple[float, float] | None:
        """Return the shortest wait of the replicas that can serve now, in seconds, and the prefill rate of all of
        them together, in tokens/s; None when no replica can serve.
        """
        with self._lock:
            self._close_circuits()
            return self._make_ready().shortest_queue()

    def given_way(self, tenants: Collection[str], num_sending: int) -> set[str]:
        """Return those of `tenants` whose next request would make a full replica preempt another tenant's request.

        They have fewer requests at the replicas than the tenant with the most, by the last heartbeats.

        `num_sending` requests are about to be sent. They, and those that no heartbeat counts yet, may be of any
        tenant. O(replicas * tenants).
        """
        with self._lock:
            now = self._clock()
            loads = [
                member.load
                for member in self._members.values()
                if member.load.requests_of and member.state(now) == "available"
            ]
            num_on_way = num_sending + sum(len(member.unseen) for member in self._members.values())
        known = Counter[str]()
        for load in loads:
            known.update(load.requests_of)
        most = max(known.values(), default=0)
        return {
            tenant
            for tenant in tenants
            if sum(load.most_requests_of(tenant) for load in loads) + num_on_way + 2 <= most
        }

    def num_idle(self) -> int:
        """Return how many more requests the replicas that can serve now could run.
        O(replicas).
        """
        with self._lock:
            now = self._clock()
            return sum(member.num_idle for member in self._members.values() if member.state(now) == "available")

    def utilisation(self) -> float:
        """Return the share of the fleet's prefill capacity that is in use, 0..1."""
        with self._lock:
            return self._make_ready().utilisation()

    def kv_tokens(self) -> int:
        """Return how many tokens fit into the KV memory of all replicas together, by their heartbeats."""
        with self._lock:
            return self._kv_tokens

    def lenders(self) -> Mapping[str, KVAddress]:
        """Return where the healthy replicas that answer lend KV. O(replicas) after a change of one of them,
        else O(1).
        """
        with self._lock:
            if self._lenders is None or self._lenders[0] != self.version:
                known = ((name, member) for name, member in self._members.items() if not member.is_out)
                found = {name: member.address.kv for name, member in known if member.address and member.address.kv}
                self._lenders = self.version, found
            return self._lenders[1]

    def stores(self) -> Mapping[str, str]:
        """Return the store of files that each replica reads, if any, by the replica's name. O(replicas) after a
        change of one of them, else O(1).
        """
        with self._lock:
            if self._stores[0] != self.version:
                known = ((name, member.address) for name, member in self._members.items())
                found = {name: address.store for name, address in known if address is not None and address.store}
                self._stores = self.version, found
            return self._stores[1]

    def with_role(self, role: str) -> frozenset[str]:
        """Return the replicas that have a role. O(replicas) after a change of one of them, else O(1)."""
        with self._lock:
            version, pools = self._roles
            if version != self.version:
                pools = {}
                for name, member in self._members.items():
                    if member.address is not None and member.address.role:
                        pools[member.address.role] = pools.get(member.address.role, frozenset()) | {name}
                self._roles = self.version, pools
            return pools.get(role, frozenset())

    def prefill_rate(self) -> float:
        """Return the mean rate at which replicas compute prompts, in tokens/s; a default until a rate is known."""
        with self._lock:
            return self._make_ready().typical_rate()

    def fetch_rate(self) -> float:
        """Return the mean rate at which replicas fetch KV from each other, in tokens/s; 0 if none does."""
        with self._lock:
            return self._fetch_rates.get(0.0)

    def _drop(self, replica: str, request_id: str) -> None:
        member = self._members[replica]
        member.drop(request_id)
        self._change(replica)

    def _change(self, replica: str) -> None:
        """Have a replica's candidate rebuilt, because its state has changed."""
        self._stale[replica] = None
        if len(self._stale) > MOST_STALE:
            self._make_ready()

    def _make_ready(self) -> ReadyCandidates:
        """Rebuild the candidates of all that have changed, and return all candidates."""
        for replica in self._stale:
            member = self._members[replica]
            is_available = not (
                replica in self._open_circuits or member.is_out or member.load.is_draining or member.load.is_full
            )
            share = None if member.is_out else member.load.prefill_share
            self._ready.put(member.candidate(replica, is_available=is_available), share)
        self._stale.clear()
        return self._ready

    def _close_circuits(self) -> None:
        """Let replicas serve again after their circuits have been open for long enough."""
        if not self._open_circuits:
            return
        now = self._clock()
        for replica in [name for name in self._open_circuits if now >= self._members[name].circuit_open_until]:
            self._open_circuits.remove(replica)
            self._change(replica)
