"""`raydix serve` as a process of its own, on a Ray of its own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READY_S = 120.0
ROOT = Path(__file__).resolve().parents[3]


def own_environment(ray_directory: Path, imports: str = str(ROOT)) -> dict[str, str]:
    """The environment of commands that share a Ray of their own; `imports` is their PYTHONPATH."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {**env, "RAY_TMPDIR": str(ray_directory), "PYTHONPATH": imports}


@contextmanager
def a_server(
    command: list[str],
    ray_directory: Path,
    log: Path,
    *,
    imports: str = str(ROOT),
    until: str = "is ready at",
    **environment: str,
) -> Iterator[subprocess.Popen[bytes]]:
    """A server that has said `until`. It runs in the folder of `log`, its output; `imports` is its PYTHONPATH."""
    env = own_environment(ray_directory, imports) | environment
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=log.parent)
    try:
        wait_for(until, log, server)
        yield server
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait(timeout=60)


def wait_for(text: str, log: Path, server: subprocess.Popen[bytes]) -> None:
    """Return when the server has written the text."""
    deadline = time.monotonic() + READY_S
    while text not in log.read_text():
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
