"""The five gauges by which Kubernetes' inference gateway picks a server, under the names that it expects by
default.

Source: Gateway API Inference Extension, docs/proposals/003-model-server-protocol; the names are vLLM's. They are
for all replicas together, as the page is: requests that wait and run anywhere, by model. promtool's lint rejects
the colon in the names, so they are off by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client.core import GaugeMetricFamily

from monitoring.metric_table import Key
from monitoring.page import Gauges

_WAITING = ("requests_waiting", "admission_waiting_requests")


def gateway_gauges(gauges: Gauges, clock: Callable[[], float] = time.time) -> list[GaugeMetricFamily]:
    """Compute them from the page's own gauges. `clock` gives Unix seconds."""
    models = sorted({key[0] for key in gauges.get("kv_pages_capacity", {})})
    running = GaugeMetricFamily("vllm:num_requests_running", "Requests in running batches.", labels=["model_name"])
    waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait.", labels=["model_name"])
    usage = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc", "KV pages that belong to requests, 1 for all.", labels=["model_name"]
    )
    config = GaugeMetricFamily(
        "vllm:cache_config_info",
        "1; the labels say how large the KV memory is.",
        labels=["model_name", "block_size", "num_gpu_blocks"],
    )
    adapters = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Unix seconds; the labels say which adapters are in use: there are none.",
        labels=["model_name", "max_lora", "waiting_lora_adapters", "running_lora_adapters"],
    )
    for model in models:
        pages = _sum(gauges, "kv_pages_capacity", model, lambda key: "device" in key[2:])
        page_size = max(value for key, value in gauges["kv_page_size_tokens"].items() if key[0] == model)
        running.add_metric([model], _sum(gauges, "requests_running", model))
        waiting.add_metric([model], sum(_sum(gauges, name, model) for name in _WAITING))
        active = _sum(gauges, "kv_pages", model, lambda key: {"active", "device"} <= set(key[2:]))
        usage.add_metric([model], active / pages if pages else 0.0)
        config.add_metric([model, f"{page_size:.0f}", f"{pages:.0f}"], 1)
        adapters.add_metric([model, "0", "", ""], clock())
    return [running, waiting, usage, config, adapters]


def _sum(gauges: Gauges, name: str, model: str, wanted: Callable[[Key], bool] = lambda _: True) -> float:
    return sum(value for key, value in gauges.get(name, {}).items() if key[0] == model and wanted(key))
