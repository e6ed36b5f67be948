"""Raydix over HTTP: `raydix serve` with one engine replica, asked by `http_load`."""

from __future__ import annotations

import asyncio
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.peers import http_load
from benchmarks.peers.process import REPOSITORY
from benchmarks.peers.protocol import Settings
from benchmarks.peers.workloads import Sizes

_START_S = 300.0
_STOP_S = 60.0


def serve_config(settings: Settings, http: str = "direct") -> dict[str, Any]:
    """A Serve config: one engine, one ingress, everything as it ships but precision, threads and room for KV."""
    from engine.config import EngineConfig

    page_size = EngineConfig(model=settings.model).page_size
    engine = {
        "model": settings.model,
        "dtype": settings.precision,
        "threads": settings.threads,
        "kv_pages": math.ceil(settings.kv_tokens / page_size) + settings.max_requests,
    }
    one = {"count": 1, "num_cpus": 0.25}
    application = {
        "name": "raydix",
        "import_path": "deployments.app:build",
        "args": {"engine": engine, "engines": one, "ingresses": {**one, "http": http}},
    }
    return {"applications": [application]}


@contextmanager
def serving(settings: Settings, http: str = "direct") -> Iterator[str]:
    """The URL of a server that is ready. Raises RuntimeError when it ends or is not ready in `_START_S`."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="raydix-http-") as directory:
        config, log = Path(directory) / "serve.yaml", Path(directory) / "log"
        config.write_text(yaml.safe_dump(serve_config(settings, http)))
        with log.open("wb") as out:
            raydix = [sys.executable, "-m", "deployments.cli", "serve", str(config)]
            command = [*raydix, "--port", str(port), "--verbose"]
            process = subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(process, url, log)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=_STOP_S)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"raydix serve is not ready: {log.read_text(errors='replace')[-2000:]}")


def measure(settings: Settings, sizes: Sizes, ids: range) -> dict[str, Any]:
    """Start a server, ask it everything, end it."""
    kv_tokens = max(settings.kv_tokens, http_load.REQUESTS * (sizes.prompt + sizes.answer))
    with serving(replace(settings, kv_tokens=kv_tokens)) as url:
        return asyncio.run(http_load.measure(url, sizes, ids))
