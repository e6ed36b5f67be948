"""Ends the processes that a server on this machine would leave when Ray dies, or when the server is killed.

    raydix serve ── adopts orphaned processes ──▶ `end_descendants` finds all remaining processes
         └── pipe ──▶ Guard, a small process: if the pipe ends without a goodbye, it ends the listed processes

Processes are found in /proc, so this works only on Linux; elsewhere none is found.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ORPHAN_S = 5.0
"""Seconds in which processes can end by themselves after the server was killed, as replicas do. Ray's agents would
wait a minute for Ray's other processes.
"""
_POLL_S = 0.1
_PR_SET_CHILD_SUBREAPER = 36
_GOODBYE = "goodbye"


class Process(NamedTuple):
    """A process; its start distinguishes it from a later one with the same id."""

    pid: int
    started: int
    """In the kernel's ticks since the machine's start."""


def adopt_orphans() -> None:
    """Make this process the parent of each descendant whose own parent ends: prctl(2), PR_SET_CHILD_SUBREAPER."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> set[Process]:
    """Return the running processes started by this one, and by those, and so on."""
    children: dict[int, list[Process]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        pid = int(directory.name)
        if (stat := _stat(pid)) is not None:
            children.setdefault(stat[0], []).append(Process(pid, stat[1]))
    found: set[Process] = set()
    parents = [os.getpid()]
    while parents:
        new = children.get(parents.pop(), [])
        found.update(new)
        parents.extend(child.pid for child in new)
    return found


def end_descendants(patience_s: float) -> None:
    """Wait until this process has no descendants; kill the remaining ones after `patience_s` seconds."""
    _end(descendants, patience_s)


class Guard:
    """Ends the processes in its list `patience_s` seconds after this process was killed."""

    def __init__(self, patience_s: float = ORPHAN_S) -> None:
        # In its own session, so that no signal of this process' terminal reaches it.
        self._guard = subprocess.Popen(
            [sys.executable, "-I", __file__, str(patience_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        self._told: set[Process] = set()

    def follow(self, processes: set[Process]) -> None:
        """Add processes to the list."""
        new = {process for process in processes - self._told if process.pid != self._guard.pid}
        self._told |= new
        self._tell("".join(f"{process.pid} {process.started}\n" for process in new))

    def dismiss(self) -> None:
        """End the guard, because this process ends all others itself."""
        self._tell(_GOODBYE)
        self._guard.communicate()

    def _tell(self, text: str) -> None:
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):  # the guard has ended
            self._guard.stdin.write(text)
            self._guard.stdin.flush()


def _end(left: Callable[[], Iterable[Process]], patience_s: float) -> None:
    """Wait until all have ended; kill the remaining ones after `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while running := [process for process in left() if _is_running(process)]:
        if time.monotonic() > deadline:
            for process in running:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _is_running(process: Process) -> bool:
    stat = _stat(process.pid)
    return stat is not None and stat[1] == process.started


def _stat(pid: int) -> tuple[int, int] | None:
    """Return the parent and the start of a running process (proc(5)); None if it has ended."""
    try:
        # The name comes second, in brackets, and may have any character.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else (int(fields[1]), int(fields[19]))


def _guard() -> None:
    told = sys.stdin.read()  # read until the server ends
    if not told.endswith(_GOODBYE):
        followed = [Process(*map(int, line.split())) for line in told.splitlines()]
        _end(lambda: followed, float(sys.argv[1]))


if __name__ == "__main__":
    _guard()
