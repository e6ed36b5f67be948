"""A test host: network, processes, shared memory and a small disk of its own, in namespaces of Linux."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support.waiting import wait_until

_NAMESPACES = ("--net", "--mount", "--pid", "--ipc", "--uts")
_FIRST_PROCESS = Path(__file__).with_name("first_process.py")


class Host:
    """One host of a `Network`. Code and libraries are those of this machine; `directory` is the host's own disk,
    which has the same path in all hosts.
    """

    def __init__(self, name: str, address: str, directory: Path, disk_bytes: int) -> None:
        """Start the host, without a link. Raises OSError where the kernel or the user's rights do not allow it."""
        self.name, self.address, self.directory = name, address, directory
        command = ("unshare", *_NAMESPACES, "--fork", "--kill-child", sys.executable, str(_FIRST_PROCESS))
        self._unshare = subprocess.Popen(
            [*command, name, str(directory), str(disk_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._unshare.stdout is not None and self._unshare.stderr is not None
        if self._unshare.stdout.readline() != "up\n":
            self._unshare.wait()
            raise OSError(f"host {name} could not be started: {self._unshare.stderr.read().strip()}")
        (first,) = psutil.Process(self._unshare.pid).children()
        self.pid = first.pid
        """The host's first process, as this machine numbers it."""
        self._entered: list[subprocess.Popen[str]] = []

    def start(self, *command: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start a command in the host. `env` is added to this process's environment; `options` are Popen's."""
        entered = ("nsenter", f"--target={self.pid}", *_NAMESPACES, "--", *command)
        process = subprocess.Popen(entered, env={**os.environ, **(env or {})}, text=True, **options)
        self._entered.append(process)
        return process

    def run(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Run a command in the host to its end and return what it printed. Raises CalledProcessError."""
        process = self.start(*command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        printed, _ = process.communicate()
        if process.returncode:
            error = subprocess.CalledProcessError(process.returncode, command, printed)
            error.add_note(printed)
            raise error
        return printed

    def processes(self, *words: str) -> list[psutil.Process]:
        """Return the host's processes in whose command line all `words` occur, as this machine numbers them."""
        return [process for process in self._processes() if all(word in _command_of(process) for word in words)]

    def pause(self) -> None:
        """Suspend all processes, as a hypervisor does that moves the host, and wait until none runs.

        Each `nsenter` stops with its command: one that stopped only after it was resumed would stay stopped.
        """
        self._signal(signal.SIGSTOP)
        wait_until(lambda: all(map(_is_at_rest, [*self._processes(), *self._entered_processes()])))

    def resume(self) -> None:
        """Let paused processes run again."""
        self._signal(signal.SIGCONT)
        self._resume_entered()

    def kill(self) -> None:
        """Kill all processes of the host in one moment. The kernel closes their connections. Idempotent."""
        if self._unshare.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            while self._unshare.poll() is None:
                self._resume_entered()
                time.sleep(0.01)

    def kill_processes(self) -> None:
        """Kill all processes of the host, which stays, and wait until they have ended."""
        self._signal(signal.SIGKILL)
        wait_until(lambda: all(_status_of(process) == psutil.STATUS_ZOMBIE for process in self._processes()))

    def fill_disk(self) -> None:
        """Leave no byte free on the host's disk."""
        self.run(sys.executable, "-c", _FILL, str(self._filling))

    def free_disk(self) -> None:
        """Undo `fill_disk`."""
        self.run("rm", "-f", str(self._filling))

    @property
    def _filling(self) -> Path:
        return self.directory / "filling"

    def _resume_entered(self) -> None:
        for process in self._entered:
            process.send_signal(signal.SIGCONT)

    def _entered_processes(self) -> Iterator[psutil.Process]:
        for process in self._entered:
            if process.poll() is None:
                yield psutil.Process(process.pid)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes():
            process.send_signal(number)

    def _processes(self) -> Iterator[psutil.Process]:
        """Yield the host's processes but for the first: those of its process namespace."""
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        for process in psutil.process_iter():
            try:
                if process.pid != self.pid and os.readlink(f"/proc/{process.pid}/ns/pid") == own:
                    yield process
            except OSError:
                continue  # it has ended


_FILL = """
import errno, sys
with open(sys.argv[1], "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(2**16))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
"""


def _is_at_rest(process: psutil.Process) -> bool:
    return _status_of(process) in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)


def _status_of(process: psutil.Process) -> str:
    """Return a process's state; one that is gone counts as a zombie."""
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def in_network_of(pid: int, command: Sequence[str]) -> None:
    """Run a command in the network namespace of a process. Raises OSError with what it printed."""
    done = subprocess.run(["nsenter", f"--target={pid}", "--net", "--", *command], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
