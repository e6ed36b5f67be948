"""Admits the ranks of one group: a process that connects to rank 0 has to prove the group's key, and soon.

accept ─▶ a thread for each connection: both sides prove the key ─▶ admitted, in the order of their proofs
              └── silent for `PROOF_S`, wrong, or one too many: closed ──┘

Any process that reaches the port can connect. A silent one does not delay the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from engine.base.awake_clock import AwakeClock
from engine.base.errors import RankLost
from engine.ranks.launcher import Workers

logger = logging.getLogger(__name__)

PROOF_S = 10.0
"""Seconds in which a connection must have proved the key: a rank does so in milliseconds."""
MAX_PROVING = 64
"""Most connections that prove their keys at the same time; a further one closes the oldest."""
_POLL_SECONDS = 0.2


class Entrance:
    """Accepts the connections to a listening socket while it is open; `close` it with `with`."""

    def __init__(self, server: socket.socket, key: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        """`server` belongs to the entrance from now on. `clock` is monotonic."""
        self._server, self._key = server, key
        self._awake = AwakeClock(clock)  # clock of the accepting thread
        self._proving: dict[socket.socket, float] = {}  # peer -> its deadline, the oldest first
        self._admitted: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        server.settimeout(_POLL_SECONDS)
        self._thread = threading.Thread(target=self._accept_all, daemon=True)
        self._thread.start()

    def __enter__(self) -> Entrance:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def admit(self, workers: Workers) -> Connection:
        """Return the connection of the next rank that proves the key. Raises RankLost if a rank ends first."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._admitted.get(timeout=_POLL_SECONDS)
            if (how := workers.ended()) is not None:
                raise RankLost(f"{how}; it had not connected yet")

    def close(self) -> None:
        """Close the port, and all connections that were not returned. Idempotent."""
        with self._lock:
            self._is_closed = True
            _cut(self._proving)
        self._thread.join()
        self._server.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._admitted.get_nowait().close()

    def _accept_all(self) -> None:
        while not self._is_closed:
            now = self._awake.now()
            with contextlib.suppress(TimeoutError):
                self._begin_proof(self._server.accept()[0])
            self._cut_late(now)  # Proofs that had arrived by the deadline were read meanwhile.

    def _begin_proof(self, peer: socket.socket) -> None:
        with self._lock:
            self._proving[peer] = self._awake.now() + PROOF_S
        threading.Thread(target=self._prove, args=(peer,), daemon=True).start()

    def _cut_late(self, now: float) -> None:
        with self._lock:
            num_surplus = max(0, len(self._proving) - MAX_PROVING)
            _cut(
                peer
                for number, (peer, until) in enumerate(self._proving.items())
                if number < num_surplus or until < now
            )

    def _prove(self, peer: socket.socket) -> None:
        """Admit a connection whose peer proves the key, and prove it to the peer."""
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(os.dup(peer.fileno()))
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            is_ours = True
        except (AuthenticationError, EOFError, OSError) as error:  # The peer is not our rank, or was cut off.
            logger.warning("ranks: rejected a connection that did not prove the key: %s", error)
            is_ours = False
        with self._lock:
            del self._proving[peer]
            peer.close()
            if is_ours and not self._is_closed:
                return self._admitted.put(connection)
        return connection.close()


def _cut(peers: Iterable[socket.socket]) -> None:
    """Shut these connections down, so that their threads reach their end."""
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)
