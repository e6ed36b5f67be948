"""The application that chaos.py breaks: a Ray of its own, on one node or several, and the processes in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.private_ray import free_port, start_ray

HEAD, SEAT = "chaos_head", "chaos_seat"
"""Ray resources: what only the head node has, and what each engine replica takes one of."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is started."""

    replicas: int = 3
    ingresses: int = 1
    nodes: int = 1
    """Ray nodes for engines beside the head, when more than one; all but one suffice for all `replicas`."""

    @property
    def seats(self) -> int:
        """Engines that fit on a node."""
        return -(-self.replicas // max(1, self.nodes - 1))


class App:
    """A running application. `name` tells its processes from those of others in the same Ray."""

    def __init__(self, url: str, name: str, size: Size, cluster: Any = None) -> None:
        self.url, self.name, self.size, self.cluster = url, name, size, cluster
        self._client = httpx.Client(base_url=url, timeout=10)

    # --- what it says --------------------------------------------------------------------------------------

    async def health(self) -> dict[str, Any]:
        """/health of one of its ingresses; without replicas while none answers."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer: dict[str, Any] = (await self._get("/health")).json()
            if "replicas" in answer:
                return answer
        return {"status": "unreachable", "replicas": []}

    async def connected(self) -> set[str]:
        """Engine replicas that answer."""
        return {r["replica"] for r in (await self.health())["replicas"] if r["is_connected"]}

    async def is_whole(self) -> bool:
        """Whether all replicas are there."""
        return len(await self.connected()) >= self.size.replicas and len(self.ingresses()) >= self.size.ingresses

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels; 0 while it cannot be read."""
        return sum(value for _, value in await self.samples(name, **labels))

    async def samples(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """A metric's samples with these labels."""
        try:
            page = (await self._get("/metrics")).raise_for_status().text
        except httpx.HTTPError:
            return []
        return [
            (sample.labels, sample.value)
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    async def until(self, condition: Callable[[], Any], timeout: float) -> bool:
        """Poll until a condition, which may be asynchronous, holds; False when it takes too long."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            holds = condition()
            if await holds if asyncio.iscoroutine(holds) else holds:
                return True
            await asyncio.sleep(0.1)
        return False

    def close(self) -> None:
        """Close the connections for questions about it."""
        self._client.close()

    async def _get(self, path: str) -> httpx.Response:
        # In a thread: an asynchronous client would be bound to one event loop.
        return await asyncio.to_thread(self._client.get, path)

    # --- its processes -------------------------------------------------------------------------------------

    def engines(self) -> list[int]:
        """Processes of engine replicas."""
        return self._processes("EngineReplica")

    def ingresses(self) -> list[int]:
        """Processes of ingresses."""
        return self._processes("Ingress")

    def _processes(self, deployment: str) -> list[int]:
        """Descendants of this very process: nothing else is ever touched."""
        found = []
        for process in psutil.Process(os.getpid()).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if f"ServeReplica:{self.name}:{deployment}" in "".join(process.cmdline()):
                    found.append(process.pid)
        return sorted(found)

    def send(self, pid: int, number: signal.Signals) -> None:
        """Signal one of them, if it is still there."""
        if pid in {*self.engines(), *self.ingresses()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def arguments(size: Size) -> dict[str, Any]:
    """`deployments.app:build`'s, for the embedded model."""
    resources = {"resources": {HEAD: 0.001}} if size.nodes > 1 else {}
    seats = {"resources": {SEAT: 1}} if size.nodes > 1 else {}
    return {
        "engine": {"model": "demo", "kv_pages": 1024, "threads": 1, "speculation": {"method": "ngram"}},
        "engines": {"count": size.replicas, "num_cpus": 0.1, **seats},
        "ingresses": {"count": size.ingresses, "num_cpus": 0.1, **resources},
        "admission": {"max_wait_s": 300.0},  # a slow machine is no failure
        "health": {"check_period_s": 1.0, "check_timeout_s": 5.0},
    }


@contextlib.contextmanager
def started(size: Size) -> Iterator[App]:
    """The application in a Ray of its own; everything is gone at the end."""
    import ray
    from ray import serve

    from deployments.app import build
    from deployments.config.args import AppArgs

    with tempfile.TemporaryDirectory(prefix="rdx") as directory:
        cluster = _start_ray(size, Path(directory))
        try:
            port = free_port()
            # One proxy: several nodes' would share the port, and clients of a lost one lose everything.
            http = {"host": "127.0.0.1", "port": port, "location": "HeadOnly"}
            serve.start(http_options=http, logging_config={"enable_access_log": False})
            serve.run(build(AppArgs.model_validate(arguments(size))), name="chaos")
            yield App(f"http://127.0.0.1:{port}", "chaos", size, cluster)
        finally:
            for process in psutil.Process(os.getpid()).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.resume()  # Ray waits for what was stopped
            serve.shutdown()
            ray.shutdown()
            if cluster is not None:
                cluster.shutdown()


def _start_ray(size: Size, directory: Path) -> Any:
    """One node in this process's own Ray, or a cluster of several on this machine."""
    import ray

    memory = 100 * 2**20
    if size.nodes <= 1:
        start_ray(8, directory)
        return None
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 8, "resources": {HEAD: 1}, "object_store_memory": memory, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "temp_dir": str(directory)})
    for _ in range(size.nodes):
        cluster.add_node(num_cpus=2, resources={SEAT: size.seats}, object_store_memory=80 * 2**20)
    ray.init(address=cluster.address, log_to_driver=False)
    return cluster
