"""Redraw the pictures of the dashboards from a real Prometheus that watches a real application under load.

    python -m benchmarks.dashboards --minutes 5 --out docs

Starts `raydix serve` with two replicas of the embedded model and three tenants in a Ray of its own, and Prometheus
(Debian's package `prometheus`), both on free ports of 127.0.0.1. The tenants send conversations that begin alike;
one of them exceeds its limits. Some clients leave early or send invalid requests, and half-way a replica is
killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.private_ray import free_port
from benchmarks.serving import Load, make_prompts
from deployments.config.tenants import hash_key

SCRAPE_S = 1
PAUSE_S = 0.4
"""Seconds between an answer and the same client's next question, at the quietest time."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Clients that share a key and the beginnings of their prompts."""

    name: str
    clients: int
    weight: int
    max_tokens: int
    requests_per_minute: int | None = None

    @property
    def key(self) -> str:
        """Its API key."""
        return f"rdx-{self.name}-of-the-dashboards"


TENANTS = (
    Tenant("search", clients=5, weight=2, max_tokens=24),
    Tenant("assistant", clients=5, weight=1, max_tokens=80),
    Tenant("batch", clients=3, weight=1, max_tokens=48, requests_per_minute=60),
)


def main() -> None:
    """Start, load, draw, stop."""
    options = _options()
    if shutil.which("prometheus") is None:
        sys.exit("prometheus is not installed; Debian has it in the package of that name")
    port, prometheus_port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="rdx") as folder, contextlib.ExitStack() as stack:
        directory = Path(folder)
        config = _written(directory / "app.yaml", _application(options.replicas, options.kv_pages))
        scrape = _written(directory / "prometheus.yml", _scrape(port))
        serve = [sys.executable, "-m", "deployments.cli", "serve", str(config), "--port", str(port)]
        application = stack.enter_context(_running(serve, directory / "app.log"))
        prometheus = [
            "prometheus",
            f"--config.file={scrape}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{prometheus_port}",
        ]
        stack.enter_context(_running(prometheus, directory / "prometheus.log"))
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, application, directory / "app.log")
        print(f"{url} is up; load for {options.minutes:g} minutes", flush=True)
        # The load runs longer than the pictures show, because rates need a window before their first point.
        asyncio.run(_load(url, options.minutes * 60 + 40, application.pid, kill=options.replicas > 1))
        preview = ["--prometheus", f"http://127.0.0.1:{prometheus_port}", "--out", str(options.out)]
        preview += ["--minutes", str(options.minutes)]
        subprocess.run([sys.executable, "-m", "benchmarks.dashboard_preview", *preview], check=True)


async def _load(url: str, seconds: float, server: int, *, kill: bool) -> None:
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=64)
    async with (
        httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for tenant in TENANTS:
            for number in range(tenant.clients):
                group.create_task(
                    _converse(client, tenant, random.Random(f"{tenant.name} {number}"), end, seconds)
                )
        if kill:
            group.create_task(_kill_one(client, server, seconds * 0.6))


async def _converse(
    client: httpx.AsyncClient, tenant: Tenant, draw: random.Random, end: float, span: float
) -> None:
    """Run one client that asks, reads and pauses; its pauses lengthen and shorten twice during the run."""
    load = Load(requests=400, prefixes=4, prefix_words=90, prompt_words=30, seed=len(tenant.name))
    prompts = make_prompts(load)
    while time.monotonic() < end:
        await _ask(client, tenant, draw.choice(prompts), draw)
        phase = (end - time.monotonic()) / span * 4 * math.pi
        await asyncio.sleep(PAUSE_S * (1.1 + math.sin(phase)) * draw.uniform(0.2, 1.8))


async def _ask(client: httpx.AsyncClient, tenant: Tenant, prompt: str, draw: random.Random) -> None:
    body: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": prompt}],
        "max_completion_tokens": draw.randint(4, tenant.max_tokens),
        "stream": True,
        "temperature": 0.7,
    }
    if draw.random() < 0.01:
        body["temperature"] = -1  # an invalid request
    leaves_after = draw.randint(1, 10) if draw.random() < 0.03 else None
    headers = {"authorization": f"Bearer {tenant.key}"}
    with contextlib.suppress(httpx.HTTPError):
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            if answer.status_code == 429:
                await asyncio.sleep(1.0)
            number = 0
            async for _ in answer.aiter_lines():
                number += 1
                if number == leaves_after:
                    return


async def _kill_one(client: httpx.AsyncClient, server: int, after_s: float) -> None:
    """Kill a replica while all have streams, as the kernel does when memory runs out; Serve starts another."""
    await asyncio.sleep(after_s)
    while min(await _running_requests(client), default=0) < 2:
        await asyncio.sleep(0.2)
    for process in psutil.Process(server).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ServeReplica:raydix:EngineReplica" in "".join(process.cmdline()):
                process.send_signal(signal.SIGKILL)
                print(f"killed {process.pid}", flush=True)
                return


async def _running_requests(client: httpx.AsyncClient) -> list[float]:
    """Return the running requests of each replica from /metrics."""
    page = (await client.get("/metrics")).text
    families = text_string_to_metric_families(page)
    return [s.value for family in families for s in family.samples if s.name == "raydix_requests_running"]


def _application(replicas: int, kv_pages: int) -> dict[str, Any]:
    tenants = [
        {
            "name": tenant.name,
            "key_hashes": [hash_key(tenant.key)],
            "weight": tenant.weight,
            "requests_per_minute": tenant.requests_per_minute,
        }
        for tenant in TENANTS
    ]
    args = {
        "engine": {"model": "demo", "kv_pages": kv_pages, "threads": 1},
        "engines": {"count": replicas, "num_cpus": 0.1},
        "ingresses": {"count": 1, "num_cpus": 0.1},
        "tenants": tenants,
        "protect_metrics": False,  # for the Prometheus that is started beside it
    }
    application = {"name": "raydix", "import_path": "deployments.app:build", "args": args}
    return {"proxy_location": "Disabled", "applications": [application]}


def _scrape(port: int) -> dict[str, Any]:
    target = {"job_name": "raydix", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    return {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": [target]}


def _written(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


@contextlib.contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_until_healthy(url: str, application: subprocess.Popen[bytes], log: Path, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and application.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5.0).status_code == 200:
                return
        time.sleep(0.5)
    sys.exit(f"the application did not start:\n{log.read_text()[-2000:]}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draw the dashboards of a real application under load.")
    parser.add_argument("--minutes", type=float, default=5.0, help="minutes of load and of the pictures")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kv-pages", type=int, default=192, help="per replica; few, so that pages are evicted")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder for the PNGs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
