"""Keeps a connection to each replica of a fleet; if one is gone, until its last stream has ended."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import zmq

from deployments.client.attempt import DispatchContext
from deployments.client.replica_watch import Watch
from deployments.wire.connection import WireConnection
from deployments.wire.open_files import shortage
from router.addresses import ReplicaAddress

logger = logging.getLogger("ray.serve")

TURN_CONNECTIONS = 16
"""Connections made in one turn of the event loop, some 10 ms: streams continue while a fleet is connected."""


class Connector:
    """Makes and ends the connections of one ingress, in its event loop."""

    def __init__(
        self,
        dispatch: DispatchContext,
        connect: Callable[[ReplicaAddress], WireConnection],
        watch: Callable[[str], Watch | None],
        on_left: Callable[[WireConnection], None],
    ) -> None:
        """`connect` opens a connection, `watch` begins to watch its replica's process, and `on_left` receives each
        connection that ends.
        """
        self._dispatch, self._connections = dispatch, dispatch.connections
        self._connect, self._watch, self._on_left = connect, watch, on_left
        self._watches: dict[str, Watch] = {}
        self._departed: Counter[str] = Counter()  # counts of closed connections
        self._synced_version: int | None = None
        """The fleet's version to which all connections belong; None while some must be closed or opened."""
        self._short_of: int | None = None
        """Size of the fleet that needs more open files than allowed; None when there are enough."""
        self._next_turn: asyncio.Handle | None = None

    @property
    def has_more(self) -> bool:
        """Whether later turns of the event loop connect to further replicas."""
        return self._next_turn is not None

    def counts(self) -> Counter[str]:
        """Return the counts of all connections, including closed ones."""
        counts = Counter(self._departed)
        for connection in self._connections.values():
            counts.update(connection.counts)
        return counts

    def sync(self) -> None:
        """Connect to new replicas; disconnect from those that are gone once their last stream has ended.

        Later turns of the event loop connect to what exceeds `TURN_CONNECTIONS`; calls meanwhile add nothing to a
        turn. O(1) if no replica has come, gone or moved.
        """
        if self._next_turn is None and self._synced_version != self._dispatch.fleet.version:
            self._take_turn()

    def _take_turn(self) -> None:
        self._next_turn, version = None, self._dispatch.fleet.version
        addresses = self._dispatch.fleet.addresses()
        leaving = [
            replica
            for replica, connection in self._connections.items()
            if addresses.get(replica) != connection.address
        ]
        in_use = self._dispatch.in_use & set(leaving)
        for replica in leaving:
            if replica not in in_use:
                self._disconnect(replica)
        new = [address for replica, address in addresses.items() if replica not in self._connections]
        is_complete = self._connect_to(new[:TURN_CONNECTIONS], len(addresses))
        if is_complete and len(new) > TURN_CONNECTIONS:
            self._next_turn = asyncio.get_running_loop().call_soon(self._take_turn)
        elif is_complete:
            self._short_of = None
        self._synced_version = version if is_complete and not self.has_more and not in_use else None

    def close(self) -> None:
        """End all connections, and make no more."""
        if self._next_turn is not None:
            self._next_turn.cancel()
        for replica in list(self._connections):
            self._disconnect(replica)

    def _connect_to(self, addresses: Sequence[ReplicaAddress], size: int) -> bool:
        """Connect to replicas of a fleet of that size. Return False if too few files may be open for them."""
        for address in addresses:
            replica = address.replica
            try:
                connection = self._connect(address)
            except zmq.ZMQError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                if self._short_of != size:  # only once, even if a few files become free
                    logger.error(shortage(len(self._connections), size))
                self._short_of = size
                return False
            self._connections[replica] = connection
            self._dispatch.changed()
            if (watch := self._watch(replica)) is not None:
                self._watches[replica] = watch
        return True

    def _disconnect(self, replica: str) -> None:
        connection = self._connections.pop(replica)
        self._dispatch.changed()
        self._on_left(connection)
        connection.close()
        self._departed.update(connection.counts)
        if replica in self._watches:
            self._watches.pop(replica).close()
