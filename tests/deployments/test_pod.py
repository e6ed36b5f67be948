"""What a pod's probes and its preStop hook answer."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from deployments import pod
from deployments.config import AppArgs


@contextmanager
def answering(statuses: dict[str, int]) -> Iterator[str]:
    """A server that answers these paths so."""

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


def test_a_mark_outlives_the_slowest_health_check_and_not_a_lost_replica() -> None:
    """Serve gives a replica up after three failed checks; the pod is unready by then, and not before the first."""
    health = AppArgs().health
    one = health.check_period_s + health.check_timeout_s
    assert one < pod.BEAT_AGE_S < 3 * one


class Node:
    """Two replicas that go one after the other once Ray was told."""

    def __init__(self, leave: int) -> None:
        self.told: list[int] = []
        self._left, self._leave = ["ray::ServeReplica:a", "ray::ServeReplica:b"], leave

    def tell(self, seconds: int) -> None:
        self.told.append(seconds)

    def serving(self) -> list[str]:
        if self.told and len(self._left) > self._leave:
            self._left.pop()
        return list(self._left)


def test_draining_tells_ray_and_waits_until_nothing_serves() -> None:
    node = Node(leave=0)
    assert pod.drain(60.0, node.tell, node.serving, settle_s=0, poll_s=0) == []
    assert len(node.told) == 1 and 50 <= node.told[0] <= 60


def test_draining_ends_with_its_time_and_says_what_is_left() -> None:
    node = Node(leave=1)
    assert pod.drain(0.05, node.tell, node.serving, settle_s=0, poll_s=0.01) == ["ray::ServeReplica:a"]


def test_a_node_on_which_nothing_serves_is_drained_at_once() -> None:
    def never(_: int) -> None:
        raise AssertionError("Ray was asked")

    assert pod.drain(60.0, never, list, settle_s=30) == []


def test_serving_processes_are_found_by_their_titles(tmp_path: Path) -> None:
    for pid, title in {"7": "ray::ServeReplica:raydix:Ingress", "8": "ray::ProxyActor", "9": "ray::IDLE"}.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_bytes(title.encode() + b"\0\0")
    (tmp_path / "10").mkdir()  # it ended meanwhile
    assert pod.serving_here(tmp_path) == ["ray::ProxyActor", "ray::ServeReplica:raydix:Ingress"]


def test_the_probe_says_why_and_loads_nothing_heavy() -> None:
    probe = "import sys; from deployments import pod; code = pod.main(['ready', 'ingress']); "
    probe += "print(sorted({'ray', 'torch', 'pydantic'} & sys.modules.keys())); sys.exit(code)"
    environment = {"RAYDIX_URL": "http://127.0.0.1:1", "PYTHONPATH": str(Path(pod.__file__).parents[1])}
    began = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True)
    assert (began.returncode, began.stdout) == (1, "[]\n")
    assert "/-/healthz does not answer" in began.stderr
