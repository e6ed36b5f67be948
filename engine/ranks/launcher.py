"""Starting the ranks after the first: as processes of this machine, or however whoever runs the engine does it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol

import msgspec


class Seat(msgspec.Struct, frozen=True):
    """What a new rank has to know to find rank 0, on the same machine. Holds a secret: not for command lines."""

    rank: int
    port: int
    """Of the loopback address: where rank 0 waits for it."""
    key: bytes
    """With which both prove who they are."""
    gpu: int
    """Which of the GPUs that its process sees is its own."""


class Workers(Protocol):
    """The ranks that were started."""

    def ended(self) -> str | None:
        """How one of them ended, if one did that cannot say so itself any more; None otherwise."""
        ...

    def close(self) -> None:
        """End all of them that have not ended, and wait for it. Idempotent."""
        ...


class WorkerLauncher(Protocol):
    """A way to start ranks."""

    @property
    def shares_gpus(self) -> bool:
        """Whether a rank sees all ranks' GPUs, so that it must take the one of its number."""
        ...

    def launch(self, seats: Sequence[Seat]) -> Workers:
        """Have `engine.ranks.worker.work` run for each seat, on this machine, each in a process of its own."""
        ...


class LocalProcesses:
    """Ranks as child processes."""

    shares_gpus = True

    def launch(self, seats: Sequence[Seat]) -> Children:
        """Plain ones, that import what they need: forked ones could not use CUDA, and multiprocessing's would run
        the caller's script anew.
        """
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        children = Children()
        for seat in seats:
            child = subprocess.Popen(
                [sys.executable, "-m", "engine.ranks.worker"],
                stdin=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # an interrupt from the keyboard is rank 0's to handle
            )
            children.processes.append(child)
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
                pipe.write(msgspec.msgpack.encode(seat))
        return children


class Children:
    """The processes of ranks 1, 2, ..."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def ended(self) -> str | None:
        """As `Workers.ended`."""
        codes = [(process.poll(), rank) for rank, process in enumerate(self.processes, start=1)]
        ends = [(code, rank) for code, rank in codes if code is not None]
        if not ends:
            return None
        code, rank = min(ends)  # one that was killed is why others failed
        how = f"killed by signal {-code}" if code < 0 else f"with exit status {code}"
        return f"rank {rank} ended, {how}; its messages are on the standard error output"

    def close(self) -> None:
        """As `Workers.close`."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
