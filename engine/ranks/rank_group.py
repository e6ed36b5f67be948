"""Rank 0's side of a rank group: starts the other ranks, sends them their tasks, and watches them.

launch ─▶ each connects ─▶ LoadTask ─▶ RankReady from each ─▶ StepTask, WritePage, ... ─▶ close: all ranks end
                             └── watched: after a RankFailed or a closed connection, the group is lost ──┘
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import cast

import torch

from engine.base.awake_clock import LOOK_S, Patience
from engine.base.errors import RankLost
from engine.kv_tier.rank_pages import Moved
from engine.parallel.collective import Collective, join, open_store
from engine.parallel.rank_network import ONE_MACHINE, RankNetwork, address_of
from engine.parallel.shard import Shard
from engine.parallel.stage import Stage
from engine.ranks.entrance import Entrance
from engine.ranks.launcher import RankSpec, WorkerLauncher, Workers
from engine.ranks.messages import (
    MAX_REPORT_BYTES,
    CopyExperts,
    FinishTask,
    LendPage,
    LoadTask,
    MovedPage,
    PagePart,
    PageReport,
    PageTask,
    RankFailed,
    RankReady,
    ReadPage,
    ReplayTask,
    StepTask,
    StoredPage,
    StorePage,
    WritePage,
    encode,
    read_report,
)
from engine.settings.config import EngineConfig

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
# Seconds: a failed rank's report arrives a little later than the errors that its end causes on the others.
_REPORT_SECONDS = 1.0
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class RankGroup:
    """The ranks after the first. The owner closes it; the ranks also end with this process."""

    def __init__(
        self, workers: Workers, connections: Sequence[Connection], network: RankNetwork = ONE_MACHINE
    ) -> None:
        """`connections`: those to the other ranks, in any order; `join` finds out which is whose."""
        self.size, self._network = len(connections) + 1, network
        self._workers, self._connections = workers, connections
        self._ranks: Collective | None = None
        self._lost = threading.Event()
        self._reason = ""
        self._on_lost: list[Callable[[str], None]] = []
        self._on_moved: Callable[[Moved], None] = lambda moved: None
        self._on_part: Callable[[PagePart | StoredPage], None] = lambda part: None
        self.max_report_bytes = MAX_REPORT_BYTES
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._end = weakref.finalize(self, _end, workers, connections)

    @classmethod
    def start(cls, launcher: WorkerLauncher, size: int, interface: str | None = None) -> RankGroup:
        """Start `size` - 1 ranks and return when all have connected. `interface`: the network interface that they
        use if they are on several hosts.

        Raises RankLost if one ends first, and ValueError if there is no such interface.
        """
        key, network = secrets.token_bytes(32), launcher.network
        if interface is not None:
            address = address_of(interface)
            if not network.is_one_machine:
                network = replace(network, host=address, interface=interface)
        server = network.listen()
        port = server.getsockname()[1]
        with Entrance(server, key) as entrance:
            specs = [
                RankSpec(rank, network, port, key, rank if launcher.shares_gpus else 0) for rank in range(1, size)
            ]
            workers = launcher.launch(specs)
            try:
                return cls(workers, [entrance.admit(workers) for _ in specs], network)
            except BaseException:
                workers.close()
                raise

    def join(
        self, config: EngineConfig, device_name: str, device: torch.device, starts: tuple[int, ...] = (0,)
    ) -> Collective:
        """Send the ranks their load tasks and form their process groups. `starts`: the first layer of each stage.

        Raises RankLost, and ValueError when the GPUs differ.
        """
        store, port = open_store(self.size, self._network)
        self._send(encode(LoadTask(config, port, starts)))
        names, connection_of = {0: device_name}, {}
        for connection in self._connections:
            ready = self._read_ready(connection)
            names[ready.rank], connection_of[ready.rank] = ready.device_name, connection
        self._connections = [connection_of[rank] for rank in range(1, self.size)]
        check_alike(names)
        threading.Thread(target=_watch, args=(weakref.ref(self), self._connections), daemon=True).start()
        shard, stage = Shard.of_engine(config, 0), Stage(0, starts)
        one_shot_kib, network, context = config.one_shot_kib, self._network, config.context_parallel_size
        self._ranks = self._join_unless_lost(
            lambda: join(store, shard, device, one_shot_kib, stage, network, context)
        )
        return self._ranks

    def _join_unless_lost(self, join_others: Callable[[], Collective]) -> Collective:
        """Call `join_others` in a thread, which is abandoned if a rank ends meanwhile, because torch would keep
        waiting.

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

    def send(self, task: StepTask | FinishTask | ReplayTask | CopyExperts, size: int | None = None) -> None:
        """Send a step, or new copies, to all other ranks, or to those of the first `size`. Raises RankLost."""
        with self.guarded():
            self._send(encode(task), size)

    def write_page(self, key: bytes, page: int, blocks: Sequence[int]) -> None:
        """Let the other ranks write their parts of a host page (`OtherRanks`)."""
        self._send_unless_lost(WritePage(key, page, blocks))

    def read_page(self, key: bytes, page: int) -> None:
        """Let the other ranks read their parts of a page into a host page."""
        self._send_unless_lost(ReadPage(key, page))

    def on_moved(self, call: Callable[[Moved], None]) -> None:
        """Call `call`, in a thread, with each part that another rank has moved or failed to move."""
        self._on_moved = call

    def lend_page(self, task: LendPage) -> None:
        """Let the other ranks send their parts of a page."""
        self._send_unless_lost(task)

    def store_page(self, page: int, parts: Sequence[memoryview]) -> None:
        """Let each of the other ranks write its part of a host page, before the steps sent from now on."""
        with contextlib.suppress(OSError), self._sending:
            for connection, part in zip(self._connections, parts, strict=True):
                connection.send_bytes(encode(StorePage(page, part)))

    def on_part(self, call: Callable[[PagePart | StoredPage], None], part_bytes: int) -> None:
        """Call `call`, in a thread, with each part of a page, of so many bytes, that another rank sends or has
        stored.
        """
        self.max_report_bytes = MAX_REPORT_BYTES + part_bytes
        self._on_part = call

    def take_report(self, report: PageReport) -> None:
        """Process a report of another rank on its part of a page."""
        if isinstance(report, MovedPage):
            self._on_moved(Moved(report.is_write, report.page, report.is_done))
        else:
            self._on_part(report)

    def _send_unless_lost(self, work: PageTask) -> None:
        with contextlib.suppress(OSError):  # The watching thread notices that a rank has ended.
            self._send(encode(work))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn an error in a common operation of all ranks into a RankLost if a rank's end caused it."""
        try:
            yield
        except (RuntimeError, OSError) as error:  # the error types of torch and of connections
            patience = Patience(_REPORT_SECONDS)
            while not (is_lost := self._lost.wait(LOOK_S)) and not patience.is_over():
                pass
            if is_lost:
                raise RankLost(self._reason) from error
            raise

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` with the reason when a rank is lost, from another thread; immediately if one is."""
        with self._lock:
            self._on_lost.append(on_lost)
        if self._lost.is_set():
            on_lost(self._reason)

    def lose(self, reason: str) -> None:
        """Mark the group as lost: a rank has ended, or the ranks no longer run the same steps. Only the first
        reason counts.
        """
        with self._lock:
            if self._lost.is_set() or not self._end.alive:
                return
            self._reason = reason
            self._lost.set()
            listeners = list(self._on_lost)
        logger.error("ranks: %s", reason)
        if self._ranks is not None:
            self._ranks.abort()
        for listener in listeners:
            listener(reason)

    def how_one_ended(self) -> str:
        """Wait a moment for the exit status of a rank whose connection has closed, and describe how it ended."""
        patience = Patience(_REPORT_SECONDS / 2)
        while (how := self._workers.ended()) is None and not patience.is_over():
            time.sleep(_POLL_SECONDS / 20)
        return how or "a rank's connection has closed: its process has ended, or its host does not answer"

    def rank_of(self, connection: Connection) -> int:
        """Return the rank at the other end of a connection."""
        return self._connections.index(connection) + 1

    def close(self) -> None:
        """End all ranks after the first. Idempotent."""
        self._end()

    def _send(self, message: bytes, size: int | None = None) -> None:
        with self._sending:
            for connection in self._connections[: None if size is None else size - 1]:
                connection.send_bytes(message)

    def _read_ready(self, connection: Connection) -> RankReady:
        try:
            report = read_report(connection.recv_bytes(MAX_REPORT_BYTES))
        except (EOFError, OSError) as error:
            raise RankLost(f"{self.how_one_ended()}; it had not begun to load its share") from error
        if isinstance(report, RankReady):
            return report
        raise RankLost(report.reason if isinstance(report, RankFailed) else "a rank moved pages before it loaded")


def check_alike(names: Mapping[int, str]) -> None:
    """Raise ValueError if ranks have different kinds of GPUs: the slowest would set the pace of all."""
    if len(set(names.values())) > 1:
        listed = ", ".join(f"rank {rank}: {name}" for rank, name in sorted(names.items()))
        raise ValueError(
            f"the GPUs of a replica are {listed}; they must be of one kind, because a step waits for its slowest "
            "rank. Choose the nodes (engines.resources) or the GPUs (CUDA_VISIBLE_DEVICES) so that they are alike"
        )


def _watch(rank_group: weakref.ref[RankGroup], connections: Sequence[Connection]) -> None:
    """Process ranks' reports on pages, until one reports a failure or closes its connection, or the group is gone;
    mark it as lost.
    """
    reason = None
    while reason is None:
        try:
            ready = cast("list[Connection]", wait(connections, _POLL_SECONDS))
        except OSError:  # `_end` has closed the connections.
            return
        group = rank_group()
        if group is None:
            return
        reason = _take(ready, group, list(connections))
        del group
    if (group := rank_group()) is not None:
        group.lose(reason or group.how_one_ended())


def _take(ready: Sequence[Connection], group: RankGroup, open_ones: list[Connection]) -> str | None:
    """Process a report from each connection that is ready. Return None unless a rank has failed: then the first
    reported reason, or "" if a rank ended without a report, because the reports of others only follow from its
    end.
    """
    reason = None
    try:
        while ready:
            for connection in ready:
                news = read_report(connection.recv_bytes(group.max_report_bytes))
                if not isinstance(news, RankReady | RankFailed):
                    group.take_report(news)
                    continue
                why = news.reason if isinstance(news, RankFailed) else f"rank {news.rank} started again"
                reason = reason or why
                open_ones.remove(connection)
            if reason is None:
                return None
            ready = cast("list[Connection]", wait(open_ones, _POLL_SECONDS)) if open_ones else []
    except (EOFError, OSError) as error:
        is_silent = isinstance(error, OSError) and error.errno in _UNREACHABLE
        return f"the host of rank {group.rank_of(connection)} does not answer: {error}" if is_silent else ""
    return reason


def _end(workers: Workers, connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.close()
    workers.close()
