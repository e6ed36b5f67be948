"""The limit of a process's open files: a connection to a replica takes two of them, a client's takes one."""

from __future__ import annotations

import contextlib
import resource

FILES_PER_REPLICA = 2
"""A connection's own, and the one with which ZeroMQ wakes the event loop."""


def allow_open_files() -> None:
    """Raise this process's limit of open files to its hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system with other rules: the limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def shortage(num_connected: int, num_replicas: int) -> str:
    """Return what to do if a process can connect to only so many of the replicas, for lack of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this ingress is connected to {num_connected} of {num_replicas} replicas, and places requests only at "
        f"these: it may have {soft} open files (its hard limit is {hard}), and needs {FILES_PER_REPLICA} for each "
        "replica and one for each client's connection; raise the hard limit where Ray is started: `ulimit -Hn` in "
        "a shell, LimitNOFILE in systemd, `ulimits` in Docker, the container runtime's limit on Kubernetes"
    )
