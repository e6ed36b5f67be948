"""A private Ray on one node of this machine, of which nothing is left afterwards."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

HOST = "127.0.0.1"


@contextlib.contextmanager
def private_ray(num_cpus: int) -> Iterator[None]:
    """Ray with so many CPUs to reserve, whatever the machine has; Serve is shut down with it."""
    import ray
    from ray import serve

    with tempfile.TemporaryDirectory(prefix="rdx") as directory:
        start_ray(num_cpus, Path(directory))
        try:
            yield
        finally:
            serve.shutdown()
            ray.shutdown()


def start_ray(num_cpus: int, directory: Path) -> None:
    """Only the start; its files are in `directory`."""
    import ray

    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _temp_dir=str(directory),
    )


def free_port() -> int:
    """A TCP port nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def start_proxy(**options: float) -> int:
    """Serve's HTTP proxy on a free port, which is returned. `options` are more of its HTTP options."""
    from ray import serve

    port = free_port()
    http = {"host": HOST, "port": port, **options}
    serve.start(http_options=http, logging_config={"enable_access_log": False})
    return port
