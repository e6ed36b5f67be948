"""OpenAI-compatible servers as the benchmarks hold them: started on a free port, asked, ended completely.

    direct         `raydix serve`: one engine replica, one ingress that listens itself
    unbounded      the same, with an engine that bounds its steps by tokens alone, as the peers' engines do
    serve          the first behind Ray Serve's HTTP proxy
    vllm           vLLM's own server
    vllm_rust      the same with its front end in Rust
    rayllm         Ray Serve LLM, which runs vLLM's engine: one replica, and its own ingress and proxy
    rayllm_direct  the same in the mode that its documentation recommends for speed: HAProxy instead of Serve's
                   proxy, which sends requests to the replica's own HTTP server

Peers run in environments of their own (`benchmarks/peers/install.sh`). All have the same model, precision and
threads, and everything else as it ships.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.peers import vllm
from benchmarks.peers.process import REPOSITORY, PeerFailed, interpreter
from benchmarks.peers.protocol import Settings, encode
from benchmarks.private_ray import free_port

SERVERS = ("direct", "unbounded", "serve", "vllm", "vllm_rust", "rayllm", "rayllm_direct")
_RAYDIX = SERVERS[:3]
_UNBOUNDED = {"max_step_ms": None, "max_step_stretch": None}
"""Settings of the engine with which prompts may make a step as long as its tokens take."""
_INSTALLED = {"vllm": "vllm", "vllm_rust": "vllm", "rayllm": "rayllm", "rayllm_direct": "rayllm"}
"""The environment that each peer runs in."""
_DIRECT = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1"}
_START_S = 300.0
_STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers."""

    name: str
    url: str
    model: str
    """The model's name in requests."""
    roots: tuple[psutil.Process, ...]
    """The processes that were started; their descendants are the server's processes too."""

    def processes(self) -> Iterator[psutil.Process]:
        """Yield all processes of the server."""
        for root in self.roots:
            yield root
            yield from root.children(recursive=True)


@contextmanager
def serving(name: str, settings: Settings, home: Path, ingresses: int = 1) -> Iterator[Running]:
    """Start the server `name` and wait until it is ready. Raises PeerFailed when it does not come up.

    `home` is where peers are installed; `ingresses` is for Raydix alone.
    """
    with tempfile.TemporaryDirectory(prefix="raydix-http-", ignore_cleanup_errors=True) as directory:
        port, log = free_port(), Path(directory) / "log"
        command, special = _command(name, settings, port, home, Path(directory), ingresses)
        with log.open("wb") as out:
            environment = os.environ | special
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        try:
            url = f"http://127.0.0.1:{port}"
            yield Running(name, url, _wait(name, process, url, log), (psutil.Process(process.pid),))
        finally:
            _end(process)


def _command(
    name: str, settings: Settings, port: int, home: Path, directory: Path, ingresses: int
) -> tuple[list[str], dict[str, str]]:
    """Return the command, and what it needs in its environment."""
    if name in _RAYDIX:
        config = directory / "serve.yaml"
        config.write_text(yaml.safe_dump(_raydix_config(settings, name, ingresses)))
        raydix = [sys.executable, "-m", "deployments.cli", "serve", str(config)]
        return [*raydix, "--port", str(port), "--verbose"], {}
    place = home / _INSTALLED[name]
    python = interpreter(_INSTALLED[name], home)
    if python is None:
        raise PeerFailed(f"{name} is not installed in {place}: see benchmarks/peers/install.sh")
    special = vllm.environment(place, settings.threads)
    del special["VLLM_ENABLE_V1_MULTIPROCESSING"]  # servers run the engine in a process of its own
    if name == "vllm":
        return [str(python), "-m", "vllm.entrypoints.openai.api_server", *_vllm_options(settings, port)], special
    if name == "vllm_rust":
        special |= _rust_front_end(place / "vllm-rs")
        return [str(python), "-m", "vllm.entrypoints.cli.main", "serve", *_vllm_options(settings, port)], special
    special |= {"PYTHONPATH": str(REPOSITORY), "RAY_TMPDIR": tempfile.gettempdir()}
    special |= _DIRECT if name == "rayllm_direct" else {}
    return [str(python), "-m", "benchmarks.peers.rayllm", encode(settings), str(port)], special


def _rust_front_end(binary: Path) -> dict[str, str]:
    if not binary.exists():
        raise PeerFailed(f"vLLM's front end in Rust is not installed as {binary}: see benchmarks/peers/install.sh")
    return {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(binary)}


def _vllm_options(settings: Settings, port: int) -> list[str]:
    return [
        "--model",
        settings.model,
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", settings.precision),
        *("--max-model-len", str(settings.max_len)),
        *("--kv-cache-memory-bytes", str(vllm.kv_bytes(settings))),
        "--disable-uvicorn-access-log",
    ]


def _raydix_config(settings: Settings, name: str, ingresses: int) -> dict[str, Any]:
    """A Serve config: one engine, everything as it ships but device, precision, threads and room for KV."""
    from engine.settings.config import EngineConfig

    page_size = EngineConfig(model=settings.model).page_size
    engine: dict[str, Any] = {
        "model": settings.model,
        "device": settings.device,
        "dtype": settings.precision,
        "threads": settings.threads,
        "kv_pages": math.ceil(settings.kv_tokens / page_size) + settings.max_requests,
    }
    http = "serve" if name == "serve" else "direct"
    args = {
        "engine": engine | (_UNBOUNDED if name == "unbounded" else {}),
        "engines": {"count": 1, "num_cpus": 0.25},
        "ingresses": {"count": ingresses, "num_cpus": 0.1, "http": http},
    }
    return {"applications": [{"name": "raydix", "import_path": "deployments.app:build", "args": args}]}


def _wait(name: str, process: subprocess.Popen[bytes], url: str, log: Path) -> str:
    """Return the model's name once the server lists it and is healthy."""
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx.HTTPError, LookupError, ValueError):
            listed = httpx.get(f"{url}/v1/models", timeout=5).raise_for_status().json()["data"]
            if name.startswith("rayllm") or httpx.get(f"{url}/health", timeout=5).is_success:
                return str(listed[0]["id"])
        time.sleep(0.2)
    raise PeerFailed(f"{name} is not ready: {log.read_text(errors='replace')[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server, and what it leaves behind."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_STOP_S)
    _, left = psutil.wait_procs(family, timeout=_STOP_S / 4)
    for one in left:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    if process.poll() is None:
        process.kill()
        process.wait()
