"""The application that chaos.py breaks: a private Ray on one node or several, and the processes in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.private_ray import free_port, start_ray

HEAD, SEAT = "chaos_head", "chaos_seat"
"""Ray resources: one that only the head node has, and one of which each engine replica takes a unit."""


@dataclass(frozen=True, slots=True)
class Size:
    """Number of replicas, ingresses and nodes to start."""

    replicas: int = 3
    ingresses: int = 1
    nodes: int = 1
    """Ray nodes for engines besides the head, if more than one; all but one suffice for all `replicas`."""
    apart: bool = False
    """Whether prompts are computed by replicas of their own, so that their KV goes from one to another."""
    files: bool = False
    """Whether KV is kept in files too. All replicas share them, so little of it then goes from one to another."""

    @property
    def seats(self) -> int:
        """Number of engines that fit on a node."""
        return -(-self.replicas // max(1, self.nodes - 1))


_LOOKS = 4
"""Requests for each ingress that tell whether all of them are connected."""


class App:
    """A running application. `name` distinguishes its processes from those of others in the same Ray."""

    def __init__(
        self,
        url: str,
        name: str,
        size: Size,
        cluster: Any = None,
        headers: Mapping[str, str] | None = None,
        tier: Path | None = None,
    ) -> None:
        """`headers` are those of this program's own requests, such as an admin's key; `tier` is the directory with
        KV in files.
        """
        self.tier = tier
        self.url, self.name, self.size, self.cluster = url, name, size, cluster
        self._client = httpx.Client(base_url=url, timeout=10, headers=headers)

    # --- health and metrics --------------------------------------------------------------------------------

    async def health(self) -> dict[str, Any]:
        """Return /health of one of its ingresses; without replicas while none answers."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer: dict[str, Any] = (await self._get("/health")).json()
            if "replicas" in answer:
                return answer
        return {"status": "unreachable", "replicas": []}

    async def connected(self) -> set[str]:
        """Return the engine replicas that answer."""
        return {r["replica"] for r in (await self.health())["replicas"] if r["is_connected"]}

    async def is_whole(self) -> bool:
        """Whether all ingresses listen, each connected to all replicas: new connections go to any of them."""
        listening = [self._listens(ingress) for ingress in self.ingresses()]  # none does behind Serve's proxy
        if len(listening) < self.size.ingresses or (any(listening) and not all(listening)):
            return False
        for _ in range(_LOOKS * self.size.ingresses):
            if len(await self.connected()) < self.size.replicas:
                return False
        return True

    def _listens(self, ingress: int) -> bool:
        """Whether a process listens on the application's port."""
        with contextlib.suppress(psutil.Error):
            sockets = psutil.Process(ingress).net_connections("tcp")
            return any(
                one.status == psutil.CONN_LISTEN and one.laddr.port == self._client.base_url.port
                for one in sockets
            )
        return False

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels; 0 while it cannot be read."""
        return sum(value for _, value in await self.samples(name, **labels))

    async def samples(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Return a metric's samples with these labels."""
        try:
            page = (await self._get("/metrics")).raise_for_status().text
        except httpx.HTTPError:
            return []
        lines = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return [
            (sample.labels, sample.value)
            for family in text_string_to_metric_families("\n".join(lines))
            for sample in family.samples
            if labels.items() <= sample.labels.items()
        ]

    async def until(self, condition: Callable[[], Any], timeout: float) -> bool:
        """Poll until a condition, which may be asynchronous, holds; returns False on timeout."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            holds = condition()
            if await holds if asyncio.iscoroutine(holds) else holds:
                return True
            await asyncio.sleep(0.1)
        return False

    def close(self) -> None:
        """Close the connections to the application."""
        self._client.close()

    async def _get(self, path: str) -> httpx.Response:
        # In a thread: an asynchronous client would be bound to one event loop.
        return await asyncio.to_thread(self._client.get, path, headers={"Connection": "close"})

    # --- its processes -------------------------------------------------------------------------------------

    def engines(self) -> list[int]:
        """Return the processes of engine replicas."""
        return self._processes(f"ServeReplica:{self.name}:EngineReplica")

    def ingresses(self) -> list[int]:
        """Return the processes of ingresses."""
        return self._processes(f"ServeReplica:{self.name}:Ingress")

    def hubs(self) -> list[int]:
        """Return the process of the metrics hub."""
        return self._processes(f"ServeReplica:{self.name}:MetricsHub")

    def controllers(self) -> list[int]:
        """Return the process of Serve's controller."""
        return self._processes("ServeController")

    def _processes(self, title: str) -> list[int]:
        """Return processes among this process's descendants, so that no others are ever touched."""
        found = []
        for process in psutil.Process(os.getpid()).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if title in "".join(process.cmdline()):
                    found.append(process.pid)
        return sorted(found)

    def send(self, pid: int, number: signal.Signals) -> None:
        """Signal a process, if it is still there."""
        if pid in {*self.engines(), *self.ingresses(), *self.hubs(), *self.controllers()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def arguments(size: Size, port: int) -> dict[str, Any]:
    """Return the arguments of `deployments.app:build` for the embedded model, whose ingresses listen on `port`."""
    resources = {"resources": {HEAD: 0.001}} if size.nodes > 1 else {}
    seats = {"resources": {SEAT: 1}} if size.nodes > 1 else {}
    return {
        "engine": {
            "model": "demo",
            "kv_pages": 1024,
            "host_kv_gib": 0.05,
            "threads": 1,
            "speculation": {"method": "ngram"},
        },
        "engines": {"count": size.replicas, "num_cpus": 0.1, **seats},
        "ingresses": {"count": size.ingresses, "num_cpus": 0.1, "port": port, **resources},
        "admission": {"max_wait_s": 300.0},  # a slow machine is no failure
        "health": {"check_period_s": 1.0, "check_timeout_s": 5.0},
    }


def apart(size: Size, tier: Path | None) -> dict[str, Any]:
    """Return what `Size.apart` changes: memory for fewer prompts than there are, and small windows, so that KV is
    on its way most of the time.
    """
    num_prefill = max(1, size.replicas // 3)
    roles = {"prefill": num_prefill, "decode": size.replicas - num_prefill, "disaggregate_above_tokens": 200}
    files = {"kv_tier": {"directory": str(tier), "disk_gib": 0.03, "rescan_s": 1.0}}
    return {
        "engine": {"kv_pages": 384, "host_kv_gib": 0.01, **({} if tier is None else files)},
        "engines": {"roles": roles, "kv_fetch": {"window_mib": 0.2}},
    }


@contextlib.contextmanager
def started(
    size: Size, changes: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
) -> Iterator[App]:
    """Start the application in a private Ray; nothing is left of it at the end.

    `changes` has further arguments of the application, by section; `headers` are for the `App`.
    """
    import ray
    from ray import serve

    from deployments.app import build
    from deployments.config.args import AppArgs

    with tempfile.TemporaryDirectory(prefix="rdx") as directory:
        cluster = _start_ray(size, Path(directory))
        try:
            port = free_port()
            serve.start(proxy_location="Disabled", logging_config={"enable_access_log": False})
            args, tier = arguments(size, port), Path(directory) / "tier" if size.files else None
            if tier is not None:
                tier.mkdir()
            if size.apart:
                changes = {**apart(size, tier), **(changes or {})}
                del args["engines"]["count"]
            for section, settings in (changes or {}).items():
                args[section] = (
                    {**args.get(section, {}), **settings} if isinstance(settings, Mapping) else settings
                )
            serve.run(build(AppArgs.model_validate(args)), name="chaos")
            yield App(f"http://127.0.0.1:{port}", "chaos", size, cluster, headers, tier)
        finally:
            for process in psutil.Process(os.getpid()).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.resume()  # Ray waits for stopped processes
            serve.shutdown()
            ray.shutdown()
            if cluster is not None:
                cluster.shutdown()
            os.environ.pop("RAY_TMPDIR", None)


def _start_ray(size: Size, directory: Path) -> Any:
    """Start one node in this process's own Ray, or a cluster of several on this machine."""
    import ray

    memory = 100 * 2**20
    if size.nodes <= 1:
        start_ray(8, directory)
        return None
    from ray.cluster_utils import Cluster

    # A Cluster writes its address down for whoever starts Ray next, into a directory that it does not make.
    os.environ["RAY_TMPDIR"] = str(directory)
    (directory / "ray").mkdir()
    head = {"num_cpus": 8, "resources": {HEAD: 1}, "object_store_memory": memory, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "temp_dir": str(directory)})
    for _ in range(size.nodes):
        cluster.add_node(num_cpus=2, resources={SEAT: size.seats}, object_store_memory=80 * 2**20)
    ray.init(address=cluster.address, log_to_driver=False)
    return cluster
