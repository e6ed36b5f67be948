"""The metrics page passes Prometheus' own checks, has the gateway's gauges, and stays bounded."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from monitoring.gateway import gateway_gauges
from monitoring.hub import Hub
from monitoring.metric_table import METRICS
from monitoring.metrics import Metrics
from tests.monitoring.support.metrics_pages import check_with_promtool, page_of, sum_of


def full(replica: str, part: str = "engine") -> Metrics:
    """A process that has counted in every metric of its part."""
    metrics = Metrics("demo", replica, part)  # type: ignore[arg-type]
    for metric in METRICS:
        if metric.part not in (part, None):
            continue
        labels = {name: choices[0] if choices else "x" for name, choices in metric.labels.items()}
        if metric.kind == "gauge":
            metrics.set(metric.name, 1, **labels)
        elif metric.kind == "counter":
            metrics.inc(metric.name, 3.5, **labels)
        else:
            metrics.observe(metric.name, 0.3, 1, **labels)
    return metrics


@pytest.fixture
def hub() -> Hub:
    made = Hub()
    made.push("e", full("r1").snapshot(), 0.0)
    made.push("i", full("i1", "ingress").snapshot(), 0.0)
    return made


def test_promtool_finds_no_fault_with_any_metric(hub: Hub) -> None:
    checked = check_with_promtool(hub.render(1.0))
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_promtool_would_find_a_fault() -> None:
    assert check_with_promtool(b"# TYPE things_total gauge\nthings_total 1\n").returncode == 3


def test_the_inference_gateways_gauges_sum_over_replicas_by_model() -> None:
    hub = Hub(mirrors=[lambda gauges: gateway_gauges(gauges, clock=lambda: 1e9)])
    for model, replica, active in (("a", "r1", 10), ("a", "r2", 30), ("b", "r3", 0)):
        metrics = Metrics(model, replica, "engine")
        metrics.set("requests_running", 2)
        metrics.set("requests_waiting", 3, reason="capacity")
        metrics.set("requests_waiting", 1, reason="deferred")
        metrics.set("kv_pages", active, state="active", tier="device")
        metrics.set("kv_pages", 100 - active, state="cached", tier="device")
        metrics.set("kv_pages_capacity", 100, tier="device")
        metrics.set("kv_pages", 50, state="active", tier="host")
        metrics.set("kv_pages_capacity", 60, tier="host")
        metrics.set("kv_page_size_tokens", 16)
        hub.push(replica, metrics.snapshot(), 0.0)
    ingress = Metrics("a", "i1", "ingress")
    ingress.set("admission_waiting_requests", 5)
    hub.push("i1", ingress.snapshot(), 0.0)
    samples = page_of(hub, 1.0)
    assert sum_of(samples, "vllm:num_requests_running", model_name="a") == 4
    assert sum_of(samples, "vllm:num_requests_waiting", model_name="a") == 8 + 5
    assert sum_of(samples, "vllm:kv_cache_usage_perc", model_name="a") == pytest.approx(0.2)
    assert sum_of(samples, "vllm:kv_cache_usage_perc", model_name="b") == 0
    info = {"model_name": "a", "block_size": "16", "num_gpu_blocks": "200"}
    assert sum_of(samples, "vllm:cache_config_info", **info) == 1
    adapters = {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}
    assert sum_of(samples, "vllm:lora_requests_info", model_name="b", **adapters) == 1e9
    assert len([name for name, _ in samples if name.startswith("vllm:")]) == 2 * 5


def test_without_engines_the_gateway_gets_no_gauges() -> None:
    hub = Hub(mirrors=[gateway_gauges])
    assert not [name for name, _ in page_of(hub, 0.0) if name.startswith("vllm:")]


def test_fifty_scrapes_with_processes_that_come_and_go_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scrape every 15 s, a replica replaced with each: after fifty there is no more than after thirty."""
    monkeypatch.setattr("monitoring.hub.MAX_REMEMBERED", 8)  # soon there are as many as ever
    hub, now = Hub(num_keepers=1, patience=0.0, gone_after=60.0), 0.0
    sizes, bytes_held = [], []
    tracemalloc.start()
    try:
        living = [full(f"r{i}") for i in range(2)]
        for scrape in range(50):
            living[scrape % 2] = full(f"r{2 + scrape}")
            for metrics in living:
                hub.push(metrics.replica, metrics.snapshot(), now)
            sizes.append(hub.render(now).count(b"\n"))
            now += 15.0
            if scrape in (29, 49):
                gc.collect()
                bytes_held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # A replica's label stays for a minute after its end, for four scrapes.
    assert max(sizes[20:]) == max(sizes[:20])
    assert bytes_held[1] <= bytes_held[0] * 1.05
