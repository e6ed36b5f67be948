"""Ray on test hosts: a head and workers, each with its own raylet, and an application that `serve deploy` starts.

client ─▶ balancer ─▶ worker "one": ingress, engine ─┐
                 └──▶ worker "two": ingress, engine ─┴─ head: controller, proxy, GCS ── Redis, where installed
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from deployments.cli.ray_environment import RAY_ENVIRONMENT
from tests.cluster.support.balancer import start_balancer, wait_for_port
from tests.cluster.support.host import Host
from tests.cluster.support.network import Network
from tests.support.metric_values import sum_on_page
from tests.support.unpacked_program import libraries_of
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
_PROGRAMS = Path(sys.executable).parent
_HEAD_PORT, _DASHBOARD_PORT, _INGRESS_PORT, _PROXY_PORT, _REDIS_PORT = 6379, 8265, 8000, 8080, 6379
_WORKER_CPUS, _ENGINE_CPUS = 4, 3
"""What Ray may reserve: a worker has room for one engine."""
_ENVIRONMENT = {
    **RAY_ENVIRONMENT,
    "RAY_worker_niceness": "0",
    "RAY_prestart_worker_first_driver": "false",
    "RAY_AUTH_MODE": "disabled",  # whatever this machine's user has set up for another Ray
    # Not 3,000: Ray takes a host for dead after five failed checks. One that is paused has 10 s for each of them.
    "RAY_health_check_period_ms": "1000",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # else Serve kills a proxy that takes 5 s to start
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # not 10: Serve replaces a proxy after three failed checks
}


class RayCluster:
    """A cluster with two workers, and the addresses of the application on it."""

    def __init__(self, network: Network) -> None:
        """Start Ray on three new hosts, and a balancer and Redis on two others."""
        self.head, *self.workers = (network.host(name) for name in ("head", "one", "two"))
        self._redis = _start_redis(network.host("redis")) if shutil.which("redis-server") else None
        self.start_head()
        for worker in self.workers:
            self.join(worker)
        self._balancer = network.host("balancer")
        self.url = start_balancer(self._balancer, self.workers, _INGRESS_PORT)
        """The URL of the ingresses behind the balancer."""
        self.proxy_url = f"http://{self.head.address}:{_PROXY_PORT}"
        """The URL of the ingresses behind Serve's proxy, which no client needs."""

    def start_head(self) -> None:
        """Start Ray on the head. It continues from its state in Redis, if there is any."""
        redis = {} if self._redis is None else {"RAY_REDIS_ADDRESS": self._redis}
        self._start_ray(
            self.head,
            "--head",
            f"--port={_HEAD_PORT}",
            f"--temp-dir={self.head.directory}",
            f"--dashboard-host={self.head.address}",
            "--disable-usage-stats",
            num_cpus=0,
            env=redis,
        )
        wait_for_port(self.head.address, _DASHBOARD_PORT)

    @property
    def outlives_head(self) -> bool:
        """Whether Ray's control state is in Redis."""
        return self._redis is not None

    def join(self, worker: Host) -> None:
        """Start Ray on a worker."""
        self._start_ray(worker, f"--address={self.head.address}:{_HEAD_PORT}", num_cpus=_WORKER_CPUS)

    def balance(self) -> None:
        """Have the balancer send connections to the present workers."""
        self._balancer.kill_processes()
        start_balancer(self._balancer, self.workers, _INGRESS_PORT)

    def deploy(self, arguments: Mapping[str, Any], code: Path = ROOT) -> None:
        """Deploy an application with an ingress on each worker and two engines, or update the present one, and
        wait until it is healthy. Its processes import the packages in `code`.
        """
        ingresses = {
            "count": len(self.workers),
            "num_cpus": 0.1,
            "host": "0.0.0.0",
            "port": _INGRESS_PORT,
            "surge_percent": 0,  # no worker has room for a second one
        }
        engines = {"num_cpus": _ENGINE_CPUS, **arguments.get("engines", {"count": len(self.workers)})}
        application = {
            "name": "raydix",
            "import_path": "deployments.app:build",
            "args": {**arguments, "ingresses": ingresses, "engines": engines},
            "runtime_env": {"env_vars": {"PYTHONPATH": str(code)}},
            "deployments": [{"name": "Ingress", "max_replicas_per_node": 1}],
        }
        proxy = {"host": self.head.address, "port": _PROXY_PORT}
        config = {"proxy_location": "HeadOnly", "http_options": proxy, "applications": [application]}
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(config, file)
            file.flush()
            dashboard = f"http://{self.head.address}:{_DASHBOARD_PORT}"
            self.head.run(str(_PROGRAMS / "serve"), "deploy", "-a", dashboard, file.name, env=_ENVIRONMENT)
        wait_until(self._is_deployed, timeout_s=900)  # one replica after another, each of which drains
        wait_until(self.is_whole)
        # The balancer and the proxy learn of the ingresses in their own time.
        for url in (self.url, self.proxy_url):
            self.wait_for_answer(url)

    def wait_for_answer(self, url: str) -> None:
        """Return when an ingress says at this URL that it is ready."""
        wait_until(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == 200)

    def remove(self) -> None:
        """Remove the application, and wait until its processes have ended."""
        dashboard = f"http://{self.head.address}:{_DASHBOARD_PORT}"
        self.head.run(str(_PROGRAMS / "serve"), "shutdown", "-y", "-a", dashboard, env=_ENVIRONMENT)
        wait_until(lambda: not self.processes("ServeReplica:raydix"))

    def _is_deployed(self) -> bool:
        url = f"http://{self.head.address}:{_DASHBOARD_PORT}/api/serve/applications/"
        status: str = httpx.get(url, timeout=60).json()["applications"]["raydix"]["status"]
        assert status != "DEPLOY_FAILED", "the application could not be deployed"
        return status == "RUNNING"

    def is_whole(self) -> bool:
        """Whether both ingresses answer and reach both engines."""
        return all(self.health(worker)["status"] == "healthy" for worker in self.workers)

    def health(self, worker: Host) -> dict[str, Any]:
        """Return what the ingress on a worker says of the engines. Raises `httpx.HTTPError`."""
        health: dict[str, Any] = httpx.get(f"{self.url_of(worker)}/health", timeout=5).json()
        return health

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples whose labels match."""
        return sum_on_page(httpx.get(f"{self.url}/metrics", timeout=60).text, name, **labels)

    def url_of(self, worker: Host) -> str:
        """Return the URL of the ingress on a worker."""
        return f"http://{worker.address}:{_INGRESS_PORT}"

    def processes(self, *words: str) -> list[psutil.Process]:
        """Return the processes on all hosts in whose command line all `words` occur."""
        return [process for host in (self.head, *self.workers) for process in host.processes(*words)]

    def ingress(self, worker: Host) -> psutil.Process:
        """Return the process of the ingress on a worker."""
        (process,) = worker.processes("ServeReplica:raydix:Ingress")
        return process

    def engine(self, worker: Host) -> psutil.Process:
        """Return the process of the engine on a worker."""
        (process,) = worker.processes("ServeReplica:raydix:EngineReplica")
        return process

    def _start_ray(self, host: Host, *options: str, num_cpus: int, env: Mapping[str, str] | None = None) -> None:
        host.start(
            str(_PROGRAMS / "ray"),
            "start",
            "--block",
            f"--node-ip-address={host.address}",
            f"--num-cpus={num_cpus}",
            "--object-store-memory=80000000",
            *options,
            env={**_ENVIRONMENT, "PYTHONPATH": str(ROOT), **(env or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def _start_redis(host: Host) -> str:
    """Start Redis on a host and return its address."""
    redis = shutil.which("redis-server")
    assert redis is not None
    options = ("--bind", host.address, "--port", str(_REDIS_PORT), "--protected-mode", "no", "--save", "")
    host.start(redis, *options, "--dir", str(host.directory), env=libraries_of(redis), stdout=subprocess.DEVNULL)
    wait_for_port(host.address, _REDIS_PORT)
    return f"{host.address}:{_REDIS_PORT}"
