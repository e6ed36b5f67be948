"""Starts the application of `deployments.yaml` once for all end-to-end tests, in a private Ray on free ports."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from benchmarks.private_ray import free_port, private_ray, start_proxy
from deployments.cli.ray_environment import RAY_ENVIRONMENT
from tests.support.metric_values import sum_on_page
from tests.support.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]

# What the tests wait for does not yield to other tests beside them: Ray would give it a niceness of 15. And Ray
# starts no workers ahead of their need, each of which takes seconds of a processor. What `raydix serve` sets saves
# a tenth of a core for each application.
for _name, _value in {
    **RAY_ENVIRONMENT,
    "RAY_worker_niceness": "0",
    "RAY_prestart_worker_first_driver": "false",
}.items():
    os.environ.setdefault(_name, _value)


@dataclass(frozen=True)
class Service:
    """A running application."""

    url: str
    proxy_url: str = ""
    """Its URL behind Serve's proxy; "" if it is not asked there."""

    def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=60).json()
        return answer

    def replicas(self) -> dict[str, dict[str, Any]]:
        return {replica["replica"]: replica for replica in self.health()["replicas"]}

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples whose labels match."""
        return sum_on_page(httpx.get(f"{self.url}/metrics", timeout=60).text, name, **labels)

    def wait_until(self, condition: Callable[[], bool], timeout: float = PATIENCE_S) -> None:
        """Poll until `condition` holds; failed connections do not count as an answer."""
        wait_until(condition, timeout, lambda: f"health is {self.health()}")


@pytest.fixture(scope="session", autouse=True)
def _hears_interrupts() -> None:
    """Restore Ctrl-C, which a shell's background jobs ignore, for the processes that tests start and interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


_shared = ExitStack()
"""Stops the session's application and its Ray."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that use the session's application before all others."""
    items.sort(key=lambda item: not (item.get_closest_marker("e2e") and _uses_service(item)))


@pytest.fixture(autouse=True)
def _no_idle_application(request: pytest.FixtureRequest) -> None:
    """Stop the session's application before the first test without it: idle, it takes a tenth of a core."""
    if not _uses_service(request.node):
        _shared.close()


def _uses_service(item: pytest.Item) -> bool:
    return "service" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """The running application of `deployments.yaml`, on a free port; Serve's proxy leads to it, too."""
    application = yaml.safe_load((ROOT / "deployments.yaml").read_text())["applications"][0]
    with _shared:
        _shared.enter_context(private_ray(num_cpus=4))
        proxy_port = start_proxy()
        service = _shared.enter_context(running(application["name"], application["args"], route_prefix="/"))
        yield Service(service.url, f"http://127.0.0.1:{proxy_port}")


@contextmanager
def running(
    name: str,
    arguments: Mapping[str, Any],
    is_up: Callable[[Service], bool] = lambda service: service.health()["status"] == "healthy",
    **options: Any,
) -> Iterator[Service]:
    """Run an application on a free port, beside others; `options` are those of `serve.run`."""
    from ray import serve

    from deployments.app import build
    from deployments.config.args import AppArgs

    port = free_port()
    args = AppArgs.model_validate({**arguments, "ingresses": {**arguments.get("ingresses", {}), "port": port}})
    serve.run(build(args), name=name, **{"route_prefix": f"/{name}", **options})
    service = Service(f"http://127.0.0.1:{port}")
    try:
        service.wait_until(lambda: is_up(service))
        yield service
    finally:
        if name in serve.status().applications:
            serve.delete(name)


@pytest.fixture(scope="session")
def base_url(service: Service) -> str:
    """The application's URL, without a slash at the end."""
    return service.url


@pytest.fixture(scope="session", params=["direct", "proxy"])
def any_url(service: Service, request: pytest.FixtureRequest) -> str:
    """Either URL of the application, without a slash at the end."""
    return service.proxy_url if request.param == "proxy" else service.url


@pytest.fixture
def ray_directory() -> Iterator[Path]:
    """A directory for a second Ray on this machine. Short: the paths of its sockets must fit in 107 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="rdx", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def port() -> str:
    """A free port, for a command line."""
    return str(free_port())


def engine_pids() -> list[int]:
    """Process ids of the engine replicas of this session's Ray, which descend from this process."""
    return [
        process.pid
        for process in psutil.Process(os.getpid()).children(recursive=True)
        if "EngineReplica" in "".join(process.cmdline())
    ]


def kill(pid: int) -> None:
    """Kill the process as the kernel does when memory runs out."""
    os.kill(pid, signal.SIGKILL)
