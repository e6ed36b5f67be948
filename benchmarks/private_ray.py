"""Start a private Ray on one node of this machine, and remove it completely afterwards."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

HOST = "127.0.0.1"


@contextlib.contextmanager
def private_ray(num_cpus: int) -> Iterator[None]:
    """Run Ray with so many CPUs to reserve, whatever the machine has; Serve is shut down with it."""
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
    """Start Ray, with its files in `directory`; the caller shuts it down."""
    import ray

    # On a busy machine Serve's proxy takes longer to start than the 5 s after which Serve kills it.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _temp_dir=str(directory),
    )


def free_port() -> int:
    """Return a TCP port on which no process listens at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def start_proxy(**options: float) -> int:
    """Start Serve's HTTP proxy on a free port, and return the port. `options` are further HTTP options."""
    from ray import serve

    port = free_port()
    http = {"host": HOST, "port": port, **options}
    serve.start(http_options=http, logging_config={"enable_access_log": False})
    return port
