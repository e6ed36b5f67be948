"""What a server on this machine leaves behind: nothing, however it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

SERVER = """
import subprocess, sys
from deployments.cli.left_behind import Guard, adopt_orphans, descendants, end_descendants

adopt_orphans()
guard = Guard(patience_s=0.0)
sleeper = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
subprocess.run([sys.executable, "-c", sleeper])  # its parent ends at once
guard.follow(descendants())
print("ready", flush=True)
sys.stdin.read()
guard.dismiss()
end_descendants(patience_s=0.0)
"""


@contextmanager
def a_server() -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A process with a guard and an adopted orphan, and these two."""
    root = Path(__file__).parents[3]
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    )
    with server:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        family = psutil.Process(server.pid).children()
        assert len(family) == 2, "an orphan has got another parent"
        yield server, family


def test_a_server_ends_its_orphans() -> None:
    with a_server() as (server, family):
        server.communicate()
        assert server.returncode == 0
        assert psutil.wait_procs(family, timeout=60)[1] == []


def test_processes_that_a_killed_server_had_are_ended() -> None:
    with a_server() as (server, family):
        server.kill()
        assert psutil.wait_procs(family, timeout=60)[1] == []
