"""Other people's programs against the real application: `make clients` runs them, in an environment of their own.

The application runs from .venv with the embedded model, once for all clients. Where a client is not installed, as
in .venv itself, its file is left out.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv/bin/python"
"""The interpreter that has Raydix, its engine, and transformers to compare with."""
_READY_S = 180.0
_NEEDS = {"test_lm_eval.py": "lm_eval"}
"""The module that each client's file needs."""
collect_ignore = [name for name, module in _NEEDS.items() if find_spec(module) is None]


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """The running application's URL."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    logs = Path(tempfile.mkdtemp(prefix="rdx"))
    command = [str(PYTHON), "-m", "deployments.cli", "serve", "deployments.yaml", "--port", str(port)]
    with (logs / "output").open("wb") as output:
        server = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    try:
        _wait_until_ready(server, f"http://127.0.0.1:{port}", logs / "output")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(timeout=90)
        except subprocess.TimeoutExpired:
            server.kill()
        shutil.rmtree(logs, ignore_errors=True)


def _wait_until_ready(server: subprocess.Popen[bytes], url: str, output: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the application did not start:\n{output.read_text(errors='replace')[-4000:]}")
