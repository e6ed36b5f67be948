"""Ranks as threads of the test's process, which compute and report as processes do, but start sooner; and
processes that a test can end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from unittest.mock import patch

import pytest

from engine.parallel.rank_network import ONE_MACHINE
from engine.ranks import worker
from engine.ranks.launcher import ChildProcesses, LocalProcesses, RankSpec


class Threads:
    """Launches ranks as threads. On a machine with GPUs each thread takes its own."""

    shares_gpus = True
    network = ONE_MACHINE

    def launch(self, specs: Sequence[RankSpec]) -> RankThreads:
        """Start a thread for each spec."""
        return RankThreads(specs)


class LastFirst(Threads):
    """Launches ranks as threads, each when the one with the next number has connected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._connected = threading.Semaphore(0)
        self._connect_rank = worker.connect
        monkeypatch.setattr(worker, "connect", self._connect)

    def launch(self, specs: Sequence[RankSpec]) -> RankThreads:
        """Start the threads."""
        ranks = RankThreads()
        for spec in reversed(specs):
            ranks.start(spec)
            self._connected.acquire()
        return ranks

    def _connect(self, spec: RankSpec) -> Connection:
        connection = self._connect_rank(spec)
        self._connected.release()
        return connection


class RankThreads:
    """Ranks as threads, which end with their connections."""

    def __init__(self, specs: Sequence[RankSpec] = ()) -> None:
        self.errors: list[str] = []
        self._threads: list[threading.Thread] = []
        for spec in specs:
            self.start(spec)

    def start(self, spec: RankSpec) -> None:
        """Start another rank."""
        self._threads.append(threading.Thread(target=self._work, args=(spec,), daemon=True))
        self._threads[-1].start()

    def ended(self) -> str | None:
        """Return what a rank raised; None if none has failed."""
        return self.errors[0] if self.errors else None

    def close(self) -> None:
        """Wait for the threads to end."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank outlives its connection"

    def _work(self, spec: RankSpec) -> None:
        try:
            worker.work(spec, leave=lambda: None)
        except Exception as error:
            self.errors.append(f"rank {spec.rank}: {error!r}")


class Watched(LocalProcesses):
    """Records the processes that it starts."""

    def launch(self, specs: Sequence[RankSpec]) -> ChildProcesses:
        self.children = super().launch(specs)
        return self.children

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks after the first."""
        return [process.pid for process in self.children.processes]


class OneGpu(Watched):
    """Starts processes that share the first GPU. NCCL refuses this to ranks of one host, so each names another."""

    shares_gpus = False

    def launch(self, specs: Sequence[RankSpec]) -> ChildProcesses:
        started = ChildProcesses()
        for spec in specs:
            with patch.dict(os.environ, NCCL_HOSTID=f"raydix-rank-{spec.rank}"):
                started.processes += super().launch([spec]).processes
        self.children = started
        return started
