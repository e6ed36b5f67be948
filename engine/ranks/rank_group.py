"""Rank 0's side: the others are started, told what to do, and watched.

launch ─▶ each connects ─▶ Task ─▶ Hello from each ─▶ Work, Work, ... ─▶ close: they end with their connections
                             └─────── watched: Failed, or a connection that closes, and all is lost ───────┘
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import cast

import torch

from engine.config import EngineConfig
from engine.errors import RankLost
from engine.parallel.collective import HOST, Collective, join, open_store
from engine.parallel.shard import Shard
from engine.ranks.launcher import Seat, WorkerLauncher, Workers
from engine.ranks.messages import Failed, Hello, Task, Work, encode, read_news

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
# What a rank says of its end comes a little later than what its end does to the others.
_WORD_SECONDS = 1.0


class Team:
    """The other ranks. Whoever uses it closes it; they end with this process in any case."""

    def __init__(self, workers: Workers, connections: Sequence[Connection]) -> None:
        """`connections` are theirs, in the order of ranks from 1 on."""
        self.size = len(connections) + 1
        self._workers, self._connections = workers, connections
        self._ranks: Collective | None = None
        self._lost = threading.Event()
        self._reason = ""
        self._on_lost: list[Callable[[str], None]] = []
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end, workers, connections)

    @classmethod
    def start(cls, launcher: WorkerLauncher, size: int) -> Team:
        """Start `size` - 1 ranks; returns when all have connected. Raises RankLost when one ends before."""
        key = secrets.token_bytes(32)
        with socket.create_server((HOST, 0)) as server:
            server.settimeout(_POLL_SECONDS)
            port = server.getsockname()[1]
            seats = [Seat(rank, port, key, rank if launcher.shares_gpus else 0) for rank in range(1, size)]
            workers = launcher.launch(seats)
            try:
                return cls(workers, [_accept(server, key, workers) for _ in seats])
            except BaseException:
                workers.close()
                raise

    def join(self, config: EngineConfig, device_name: str, device: torch.device) -> Collective:
        """Tell them what to load, and meet them. Raises RankLost, and ValueError where GPUs differ."""
        store, port = open_store(self.size)
        self._send(encode(Task(config, port)))
        names = {0: device_name}
        for connection in self._connections:
            hello = self._news(connection)
            names[hello.rank] = hello.device_name
        check_alike(names)
        threading.Thread(target=_watch, args=(weakref.ref(self), self._connections), daemon=True).start()
        self._ranks = self._meet(lambda: join(store, Shard.of_engine(config, 0), device))
        return self._ranks

    def _meet(self, join_others: Callable[[], Collective]) -> Collective:
        """In a thread that is left behind when a rank ends on its way: torch would wait for it.

        Raises RankLost.
        """
        met: list[Collective | Exception] = []

        def meet() -> None:
            try:
                met.append(join_others())
            except Exception as error:
                met.append(error)

        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        while thread.is_alive() and not self._lost.is_set():
            thread.join(_POLL_SECONDS)
        if not met:
            raise RankLost(self._reason)
        if isinstance(met[0], Exception):
            raise met[0]
        return met[0]

    def send(self, work: Work) -> None:
        """Have a step computed. Raises RankLost."""
        with self.guarded():
            self._send(encode(work))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Around what all ranks do together: what goes wrong because one is gone is a RankLost that says so."""
        try:
            yield
        except (RuntimeError, OSError) as error:  # what torch and connections raise
            if self._lost.wait(_WORD_SECONDS):
                raise RankLost(self._reason) from error
            raise

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Have `on_lost` called with the reason when a rank is gone, from another thread; at once if one is."""
        with self._lock:
            self._on_lost.append(on_lost)
        if self._lost.is_set():
            on_lost(self._reason)

    def lose(self, reason: str) -> None:
        """A rank is gone, or the ranks no longer do the same: nothing works any more."""
        with self._lock:
            if self._lost.is_set() or not self._end.alive:
                return
            self._reason = reason
            self._lost.set()
            listeners = list(self._on_lost)
        logger.error("tensor parallelism: %s", reason)
        if self._ranks is not None:
            self._ranks.abort()
        for listener in listeners:
            listener(reason)

    def how_one_ended(self) -> str:
        """What is known of a rank whose connection has closed, which is the first that one sees of its end."""
        deadline = time.monotonic() + _WORD_SECONDS / 2
        while (how := self._workers.ended()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 20)
        return how or "a rank's connection has closed: its process has ended"

    def close(self) -> None:
        """End them. Idempotent."""
        self._end()

    def _send(self, message: bytes) -> None:
        for connection in self._connections:
            connection.send_bytes(message)

    def _news(self, connection: Connection) -> Hello:
        try:
            news = read_news(connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RankLost(f"{self.how_one_ended()}; it had not begun to load its share") from error
        if isinstance(news, Hello):
            return news
        raise RankLost(news.reason)


def check_alike(names: Mapping[int, str]) -> None:
    """Raise ValueError where ranks have different kinds of GPUs: the slowest would set the pace of all."""
    if len(set(names.values())) > 1:
        listed = ", ".join(f"rank {rank}: {name}" for rank, name in sorted(names.items()))
        raise ValueError(
            f"the GPUs of a replica are {listed}; they must be of one kind, as a step waits for its slowest "
            "rank. Choose the nodes (engines.resources) or the GPUs (CUDA_VISIBLE_DEVICES) so that they are alike"
        )


def _accept(server: socket.socket, key: bytes, workers: Workers) -> Connection:
    """The next rank that connects and knows the key."""
    while True:
        try:
            accepted, _ = server.accept()
        except TimeoutError:
            if (how := workers.ended()) is not None:
                raise RankLost(f"{how}; it had not connected yet") from None
            continue
        accepted.settimeout(None)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(accepted.detach())
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
        except (AuthenticationError, EOFError, OSError) as error:  # somebody else
            logger.warning("tensor parallelism: a connection that is no rank's: %s", error)
            connection.close()
            continue
        return connection


def _watch(team: weakref.ref[Team], connections: Sequence[Connection]) -> None:
    """Until one of them has something to say, which is bad news, or none at all any more."""
    try:
        while not wait(connections, _POLL_SECONDS):
            if team() is None:
                return
    except OSError:  # `_end` has closed them
        return
    reason = _why(connections)
    if (lasting := team()) is not None:
        lasting.lose(reason or lasting.how_one_ended())


def _why(connections: Sequence[Connection]) -> str:
    """What the first rank that failed says of it; "" where one ended without a word: others fail because of it."""
    open_ones, reason = list(connections), ""
    try:
        while open_ones and (ready := wait(open_ones, _POLL_SECONDS)):
            for connection in cast("list[Connection]", ready):
                news = read_news(connection.recv_bytes())
                reason = reason or (news.reason if isinstance(news, Failed) else f"rank {news.rank} began anew")
                open_ones.remove(connection)
    except (EOFError, OSError):
        return ""
    return reason


def _end(workers: Workers, connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.close()
    workers.close()
