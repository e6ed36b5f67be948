"""Starts the ranks after the first, as processes of this machine or in another way that the caller provides."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.parallel.rank_network import ONE_MACHINE, RankNetwork


class RankSpec(msgspec.Struct, frozen=True):
    """The data by which a new rank finds rank 0. It has a secret: keep it off command lines."""

    rank: int
    network: RankNetwork
    port: int
    """Port of rank 0's address at which it waits."""
    key: bytes
    """Secret with which rank 0 and the new rank authenticate each other."""
    gpu: int
    """Index of its GPU among those that its process sees."""


class Workers(Protocol):
    """The ranks that were started."""

    def ended(self) -> str | None:
        """Return how a rank ended that could not report its end itself; None if there is none."""

    def close(self) -> None:
        """End all ranks that are still alive and wait for their end. Idempotent."""


class WorkerLauncher(Protocol):
    """A way to start ranks."""

    @property
    def shares_gpus(self) -> bool:
        """Whether each rank sees the GPUs of all ranks and has to use the one with its own number."""

    @property
    def network(self) -> RankNetwork:
        """How the ranks reach this process, rank 0, if no interface is named."""

    def launch(self, specs: Sequence[RankSpec]) -> Workers:
        """Run `engine.ranks.worker.work` for each spec, each in a separate process."""


class LocalProcesses:
    """Launches ranks as child processes."""

    shares_gpus = True
    network = ONE_MACHINE

    def launch(self, specs: Sequence[RankSpec]) -> ChildProcesses:
        """Start a new interpreter for each rank.

        Forked processes could not use CUDA, and those of multiprocessing would run the caller's script again.
        """
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        children = ChildProcesses()
        for spec in specs:
            child = subprocess.Popen(
                [sys.executable, "-m", "engine.ranks.worker"],
                stdin=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Rank 0 handles an interrupt from the keyboard.
            )
            children.processes.append(child)
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
                pipe.write(msgspec.msgpack.encode(spec))
        return children


class ChildProcesses:
    """The processes of ranks 1, 2, ..."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def ended(self) -> str | None:
        """Implement `Workers.ended`."""
        codes = [(process.poll(), rank) for rank, process in enumerate(self.processes, start=1)]
        ends = [(code, rank) for code, rank in codes if code is not None]
        if not ends:
            return None
        code, rank = min(ends)  # If a rank was killed, the others failed because of that.
        how = f"killed by signal {-code}" if code < 0 else f"with exit status {code}"
        return f"rank {rank} ended, {how}; its messages are on the standard error output"

    def close(self) -> None:
        """Implement `Workers.close`."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
