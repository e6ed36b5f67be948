"""The answers of a pod's readiness probes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from deployments.config.args import AppArgs
from deployments.replica import pod


@contextmanager
def answering(statuses: dict[str, int]) -> Iterator[str]:
    """A server that answers each path with its status; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses[self.path])
            self.end_headers()
            self.wfile.write(b"because")

        def log_message(self, format: str, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_an_ingress_is_ready_when_its_proxy_and_some_engine_are() -> None:
    with answering({"/-/healthz": 200, "/health": 200}) as url:
        pod.ready_ingress(url)
    with pytest.raises(pod.NotReadyError, match="does not answer"):
        pod.ready_ingress(url)


@pytest.mark.parametrize(("draining", "health"), [(503, 200), (200, 503)])
def test_an_ingress_that_drains_or_has_no_engine_is_not_ready(draining: int, health: int) -> None:
    answers = {"/-/healthz": draining, "/health": health}
    with answering(answers) as url, pytest.raises(pod.NotReadyError, match="answers 503: because"):
        pod.ready_ingress(url)


def test_a_beat_outlives_the_slowest_health_check_and_not_a_lost_replica() -> None:
    """Serve gives a replica up after three failed checks; the pod is unready by then, but not before the first."""
    health = AppArgs().health
    one = health.check_period_s + health.check_timeout_s
    assert one < pod.BEAT_AGE_S < 3 * one


def test_the_probe_says_why_and_loads_nothing_heavy() -> None:
    probe = "import sys; from deployments.replica import pod; code = pod.main(['ready', 'ingress']); "
    probe += "print(sorted({'ray', 'torch', 'pydantic'} & sys.modules.keys())); sys.exit(code)"
    environment = {"RAYDIX_URL": "http://127.0.0.1:1", "PYTHONPATH": str(Path(pod.__file__).parents[2])}
    began = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True)
    assert (began.returncode, began.stdout) == (1, "[]\n")
    assert "/-/healthz does not answer" in began.stderr
