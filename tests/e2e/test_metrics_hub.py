"""The hub's death in the real application, promtool's judgement on its page, and Ray's own metrics."""

from __future__ import annotations

import os
import time

import httpx
import psutil
import pytest

from monitoring.metrics import Metrics
from monitoring.ray_mirror import RayMirror
from tests.e2e.conftest import Service, kill
from tests.e2e.support.served_metrics import complete, read_page, read_when_settled
from tests.monitoring.support.metrics_pages import check_with_promtool, totals_of
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e


def hub_pids() -> list[int]:
    """The hub of the session's application: a descendant of this very process."""
    return [
        process.pid
        for process in psutil.Process(os.getpid()).children(recursive=True)
        if "ServeReplica:raydix:MetricsHub" in "".join(process.cmdline())
    ]


def next_page(service: Service) -> str:
    """The first page after the hub's death; what comes before it must not look like one."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = httpx.get(f"{service.url}/metrics", timeout=60)
        if answer.status_code == 200:
            return answer.text
        assert answer.status_code == 503 and "metrics hub" in answer.text
        assert "raydix_" not in answer.text, "half a page"
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)


def test_no_counter_runs_backwards_when_the_hub_is_killed(service: Service) -> None:
    for stream in (False, True):
        complete(service.url, stream=stream)
    read_when_settled(service.url)
    before = totals_of(httpx.get(f"{service.url}/metrics", timeout=60).text)
    assert any(name.startswith("raydix_generation_tokens_total") for name in before)
    [pid] = hub_pids()
    kill(pid)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=60)
    after = totals_of(next_page(service))
    assert pid not in hub_pids(), "the page comes from another hub"
    smaller = {series: (old, after.get(series)) for series, old in before.items() if after.get(series, -1) < old}
    assert smaller == {}
    requests = sum(read_page(service.url)["requests_total"].values())
    complete(service.url, stream=False)
    assert sum(read_when_settled(service.url)["requests_total"].values()) == requests + 1


def test_promtool_finds_no_fault_with_the_real_page(base_url: str) -> None:
    complete(base_url, stream=True)
    httpx.get(f"{base_url}/no/such/path", timeout=60)
    read_when_settled(base_url)
    checked = check_with_promtool(httpx.get(f"{base_url}/metrics", timeout=60).content)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_ray_exports_the_mirrored_metrics(service: Service) -> None:
    """Totals that are reported twice are not counted twice, and a gauge is there."""
    import ray

    metrics, mirror = Metrics("demo", "mirrored", "engine"), RayMirror()
    for tokens in (5, 2):
        metrics.inc("generation_tokens_total", tokens)
        metrics.observe("engine_step_seconds", 0.5, 4, phase="decode")
        mirror.report(metrics.snapshot())
    url = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    expected = {
        "ray_raydix_generation_tokens_total": 7.0,
        "ray_raydix_engine_step_seconds_count_total": 8.0,
        "ray_raydix_engine_step_seconds_sum_total": 4.0,
        "ray_raydix_requests_running": 0.0,
    }
    deadline, found = time.monotonic() + PATIENCE_S, dict[str, float]()
    while found != expected and time.monotonic() < deadline:
        metrics.set("requests_running", 0)
        mirror.report(metrics.snapshot())  # else Ray would forget the gauges
        page = httpx.get(url, timeout=60).text
        mine = [line for line in page.splitlines() if 'replica="mirrored"' in line]
        found = {name: float(line.rsplit(" ", 1)[1]) for line in mine if (name := line.split("{")[0]) in expected}
        time.sleep(0.5)
    assert found == expected
