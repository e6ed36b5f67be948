"""Process 1 of a test host. When this process's standard input ends, the host ends with all its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys


def main(name: str, directory: str, disk_bytes: str) -> None:
    """Give the host a name, and its own /proc, shared memory and disk, which is mounted at `directory`."""
    socket.sethostname(name)
    for command in (
        ("mount", "-t", "proc", "proc", "/proc"),
        ("mount", "-t", "tmpfs", "shm", "/dev/shm"),
        ("mount", "-t", "tmpfs", "-o", f"size={disk_bytes}", "disk", directory),
        ("ip", "link", "set", "lo", "up"),
    ):
        subprocess.run(command, check=True)
    signal.signal(signal.SIGCHLD, _bury)
    print("up", flush=True)
    sys.stdin.read()


def _bury(*_: object) -> None:
    """Wait for processes that ended after their parents, which the kernel leaves to process 1."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
